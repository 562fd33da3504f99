{{- /* The objects' name: the release's. */ -}}
{{- define "lora-fs.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- /* What selects the pods: it can never change in a release. */ -}}
{{- define "lora-fs.selector" -}}
app.kubernetes.io/name: lora-fs
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "lora-fs.labels" -}}
{{ include "lora-fs.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "lora-fs.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "lora-fs.claim" -}}
{{ .Values.storage.existingClaim | default (printf "%s-adapters" (include "lora-fs.name" .)) }}
{{- end -}}

{{- /* The secret that holds the tokens: yours, or the one that the chart makes. */ -}}
{{- define "lora-fs.tokenSecret" -}}
{{ .Values.auth.existingSecret | default (printf "%s-token" (include "lora-fs.name" .)) }}
{{- end -}}

{{- define "lora-fs.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "lora-fs.name" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{- /* lora-fs's own containers: not root, nothing to gain, nothing to write to but their mounts. */ -}}
{{- define "lora-fs.locked" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* Where clients are answered: the sidecar's port, or the engine's with the plugin. */ -}}
{{- define "lora-fs.port" -}}
{{- if eq .Values.mode "plugin" }}8000{{ else }}8001{{ end -}}
{{- end -}}

{{- /* How long the engine goes on with requests: less 10 s before it is told, and 20 s to end after them. */ -}}
{{- define "lora-fs.shutdownTimeout" -}}
{{- max 0 (sub (int .Values.terminationGracePeriodSeconds) 30) -}}
{{- end -}}

{{- /* What lora-fs is told, in the sidecar or in the engine. */ -}}
{{- define "lora-fs.env" -}}
- name: LORA_FS_ROOT
  value: /adapters
- name: LORA_FS_MODEL
  value: {{ .Values.model | quote }}
- name: LORA_FS_NAMESPACES
  value: {{ join "," .Values.namespaces | quote }}
- name: LORA_FS_STAGE_DIR
  value: /stage
- name: LORA_FS_STAGE_MAX_BYTES
  value: {{ .Values.stage.maxBytes | quote }}
- name: LORA_FS_MAX_RANK
  value: {{ .Values.engine.maxLoraRank | quote }}
- name: LORA_FS_DEFAULT_POLICY
  value: {{ .Values.sidecar.defaultPolicy | quote }}
{{- if .Values.sidecar.maxLoaded }}
- name: LORA_FS_MAX_LOADED
  value: {{ .Values.sidecar.maxLoaded | quote }}
{{- end }}
- name: LORA_FS_REPLICA_ID
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- if .Values.auth.enabled }}
- name: LORA_FS_TOKEN_FILE
  value: /etc/lora-fs/token
{{- end }}
{{- if .Values.nim.claim }}
- name: NIM_PEFT_SOURCE
  value: /nim{{ with .Values.nim.path }}/{{ . }}{{ end }}
- name: NIM_PEFT_REFRESH_INTERVAL
  value: {{ .Values.nim.refreshSeconds | quote }}
{{- end }}
{{- with .Values.sidecar.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "lora-fs.mounts" -}}
- name: adapters
  mountPath: /adapters
- name: stage
  mountPath: /stage
{{- if .Values.auth.enabled }}
- name: token
  mountPath: /etc/lora-fs
  readOnly: true
{{- end }}
{{- if .Values.nim.claim }}
- name: nim
  mountPath: /nim
  readOnly: true
{{- end }}
{{- end -}}
