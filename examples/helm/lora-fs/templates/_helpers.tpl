{{- /* The objects' name: the release's. A Service takes no dots, as qwen2.5 has. */ -}}
{{- define "lora-fs.name" -}}
{{- .Release.Name | replace "." "-" | trunc 52 | trimSuffix "-" -}}
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

{{- /* What selects the gateway's pods, which no selector of the replicas matches. */ -}}
{{- define "lora-fs.gatewaySelector" -}}
app.kubernetes.io/name: lora-fs-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "lora-fs.gatewayLabels" -}}
{{ include "lora-fs.gatewaySelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "lora-fs.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "lora-fs.engineImage" -}}
{{- with .Values.engine.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "lora-fs.claim" -}}
{{ .Values.storage.existingClaim | default (printf "%s-adapters" (include "lora-fs.name" .)) }}
{{- end -}}

{{- /* The documents that are applied: yours, or those that the chart makes of its values. */ -}}
{{- define "lora-fs.documents" -}}
{{ .Values.apply.existingConfigMap | default (printf "%s-adapters" (include "lora-fs.name" .)) }}
{{- end -}}

{{- /* The trust file and what it names: yours, or what the chart makes of its values. Empty: there is none. */ -}}
{{- define "lora-fs.trust" -}}
{{- if .Values.trust.files -}}
{{ include "lora-fs.name" . }}-trust
{{- else -}}
{{ .Values.trust.existingConfigMap }}
{{- end -}}
{{- end -}}

{{- define "lora-fs.trustEnv" -}}
- name: LORA_FS_TRUST
  value: /etc/lora-fs-trust/trust.yaml
{{- end -}}

{{- /* Without subPath, so that a change of the ConfigMap arrives. */ -}}
{{- define "lora-fs.trustMount" -}}
- name: trust
  mountPath: /etc/lora-fs-trust
  readOnly: true
{{- end -}}

{{- define "lora-fs.trustVolume" -}}
- name: trust
  configMap:
    name: {{ include "lora-fs.trust" . }}
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
{{- if not .Values.arbitraryUser }}
runAsUser: 10001
runAsGroup: 10001
{{- end }}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* Of the pods: who owns their volumes. */ -}}
{{- define "lora-fs.podSecurity" -}}
{{- if not .Values.arbitraryUser }}
fsGroup: 10001
{{- end }}
# A volume of many adapters is not walked at every start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- /* The bytes of a quantity: 20Gi. */ -}}
{{- define "lora-fs.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000
    "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- $unit := regexFind "[A-Za-z]*$" . -}}
{{- mulf (trimSuffix $unit . | float64) (get $units $unit | float64) | int64 -}}
{{- end -}}

{{- /* What lora-fs keeps of the stage folder: a copy that is being made has the rest. */ -}}
{{- define "lora-fs.stageBytes" -}}
{{- .Values.stage.maxBytes | default (div (include "lora-fs.bytes" .Values.stage.sizeLimit | int64) 2) -}}
{{- end -}}

{{- /* DNS, at the Service and at its pods: OpenShift's listen on 5353, and its rules are of the pods' ports. */ -}}
{{- define "lora-fs.dns" -}}
- port: 53
  protocol: UDP
- port: 53
  protocol: TCP
- port: 5353
  protocol: UDP
- port: 5353
  protocol: TCP
{{- end -}}

{{- /* Names by which clients outside reach the gateway, or the replicas. */ -}}
{{- define "lora-fs.hosts" -}}
{{- $hosts := list -}}
{{- if .Values.ingress.enabled }}{{ $hosts = append $hosts .Values.ingress.host }}{{ end -}}
{{- if .Values.httpRoute.enabled }}{{ $hosts = concat $hosts .Values.httpRoute.hostnames }}{{ end -}}
{{- with uniq $hosts }}
- name: LORA_FS_ALLOWED_HOSTS
  value: {{ join "," . | quote }}
{{- end }}
{{- end -}}

{{- /* Seconds in which a new pod makes progress: its model may load, after an old one ended, and images are pulled. */ -}}
{{- define "lora-fs.progressSeconds" -}}
{{- add .Values.engine.startupSeconds .Values.terminationGracePeriodSeconds 600 -}}
{{- end -}}

{{- /* Where clients are answered: the sidecar's port, or the engine's with the plugin. */ -}}
{{- define "lora-fs.port" -}}
{{- if eq .Values.mode "plugin" }}8000{{ else }}8001{{ end -}}
{{- end -}}

{{- /* The gateway's port for operations; nothing where it has none, or there is no gateway. */ -}}
{{- define "lora-fs.gatewayAdmin" -}}
{{- with .Values.gateway }}{{ if .enabled }}{{ .adminPort | default "" }}{{ end }}{{ end -}}
{{- end -}}

{{- /* The name of the port that probes and Prometheus ask: with sidecar.adminPort the other one answers neither. */ -}}
{{- define "lora-fs.operations" -}}
{{- if .Values.sidecar.adminPort }}admin{{ else }}http{{ end -}}
{{- end -}}

{{- /* How long the engine goes on with requests: less 10 s before it is told, and 20 s to end after them. */ -}}
{{- define "lora-fs.shutdownTimeout" -}}
{{- sub (int .Values.terminationGracePeriodSeconds) 30 -}}
{{- end -}}

{{- define "lora-fs.mounts" -}}
- name: adapters
  mountPath: /adapters
{{- if .Values.storage.readOnly }}
  readOnly: true
# What a replica tells of itself is written, and nothing else.
{{- range list ".replicas" ".events" }}
- name: adapters
  mountPath: /adapters/{{ . }}
  subPath: {{ . }}
{{- end }}
{{- end }}
- name: stage
  mountPath: /stage
{{- if .Values.auth.enabled }}
- name: token
  mountPath: /etc/lora-fs
  readOnly: true
{{- end }}
{{- if include "lora-fs.trust" . }}
{{ include "lora-fs.trustMount" . }}
{{- end }}
{{- if .Values.nim.claim }}
- name: nim
  mountPath: /nim
  readOnly: true
{{- end }}
{{- with .Values.sidecar.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}
