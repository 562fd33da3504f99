{{- /* A list of variables as text, each name once: the last one of a name holds, as in a container. Server-side
       apply, as of Helm 4 and Flux, refuses a name that is there twice. */ -}}
{{- define "lora-fs.once" -}}
{{- $all := fromYamlArray . -}}
{{- $last := dict -}}
{{- range $index, $one := $all }}{{ $_ := set $last $one.name $index }}{{ end -}}
{{- $kept := list -}}
{{- range $index, $one := $all }}{{ if eq $index (get $last $one.name) }}{{ $kept = append $kept $one }}{{ end }}{{ end -}}
{{ toYaml $kept }}
{{- end -}}

{{- define "lora-fs.sidecarEnv" -}}
{{ include "lora-fs.env" . }}
- name: LORA_FS_ENGINE_URL
  value: http://127.0.0.1:8000
- name: LORA_FS_PORT
  value: "8001"
{{- with .Values.sidecar.adminPort }}
- name: LORA_FS_ADMIN_PORT
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "lora-fs.engineEnv" -}}
# Models and compiled kernels are kept below these, whoever the user is.
- name: HOME
  value: /cache
- name: XDG_CACHE_HOME
  value: /cache
{{- if eq .Values.mode "plugin" }}
- name: PYTHONPATH
  value: /plugin
# A list: name the plugins of your own in engine.env, too, since vLLM loads no others.
- name: VLLM_PLUGINS
  value: lora_fs
# Longer than clients and load balancers keep a connection; vLLM's own 5 s end it under a request.
- name: VLLM_HTTP_TIMEOUT_KEEP_ALIVE
  value: "75"
{{ include "lora-fs.env" . }}
{{- else }}
- name: VLLM_ALLOW_RUNTIME_LORA_UPDATING
  value: "True"
{{- end }}
{{- with .Values.engine.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "lora-fs.gatewayEnv" -}}
- name: LORA_FS_PORT
  value: "8001"
{{- with .Values.gateway.adminPort }}
- name: LORA_FS_ADMIN_PORT
  value: {{ . | quote }}
{{- end }}
# Each ready pod's own address: a pod that ends leaves it before its engine stops.
- name: LORA_FS_REPLICAS
  value: {{ printf "dns://%s-replicas:%s" (include "lora-fs.name" .) (include "lora-fs.port" .) }}
# Streams under way end by themselves: preStop takes 10 s of the grace period.
- name: LORA_FS_SHUTDOWN_TIMEOUT_S
  value: {{ sub (int .Values.terminationGracePeriodSeconds) 20 | quote }}
- name: LORA_FS_REPLICA_ID
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- include "lora-fs.hosts" . }}
{{- with .Values.gateway.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "lora-fs.applyEnv" -}}
{{- if include "lora-fs.trust" . -}}
{{ include "lora-fs.trustEnv" . }}
{{- end }}
{{- with .Values.apply.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* What lora-fs reads, in the sidecar or in the engine. */ -}}
{{- define "lora-fs.env" -}}
- name: LORA_FS_ROOT
  value: /adapters
- name: LORA_FS_MODEL
  value: {{ .Values.model | quote }}
- name: LORA_FS_NAMESPACES
  value: {{ join "," .Values.namespaces | quote }}
# Where commands work that somebody types in the pod.
- name: LORA_FS_NAMESPACE
  value: {{ first .Values.namespaces | quote }}
- name: LORA_FS_STAGE_DIR
  value: /stage
- name: LORA_FS_STAGE_MAX_BYTES
  value: {{ include "lora-fs.stageBytes" . | quote }}
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
{{- if include "lora-fs.trust" . }}
{{ include "lora-fs.trustEnv" . }}
{{- end }}
{{- include "lora-fs.hosts" . }}
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
