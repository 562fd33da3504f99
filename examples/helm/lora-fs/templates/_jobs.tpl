{{- /* The metadata of a Job's pod: no selector of the replicas or of the gateway matches it. */ -}}
{{- define "lora-fs.jobMetadata" -}}
labels:
  app.kubernetes.io/name: lora-fs-{{ .what }}
  app.kubernetes.io/instance: {{ .top.Release.Name }}
  {{- with .top.Values.jobs.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .top.Values.jobs.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* The spec of a Job's pod, but for its containers and volumes. */ -}}
{{- define "lora-fs.jobPod" -}}
serviceAccountName: {{ include "lora-fs.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "lora-fs.podSecurity" . | trim | nindent 2 }}
{{- with include "lora-fs.beside" . }}
{{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* A Job's container, but for what it runs and mounts. */ -}}
{{- define "lora-fs.jobContainer" -}}
name: lora-fs
image: {{ include "lora-fs.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  {{- include "lora-fs.locked" . | nindent 2 }}
resources:
  requests:
    cpu: 100m
    memory: 128Mi
  limits:
    memory: 256Mi
{{- end -}}

{{- /* Where a Job's pod runs: on a replica's node, if only one node can mount the volume. */ -}}
{{- define "lora-fs.beside" -}}
{{- if not (has "ReadWriteMany" .Values.storage.accessModes) -}}
affinity:
  podAffinity:
    preferredDuringSchedulingIgnoredDuringExecution: # without a replica any node may mount it
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "lora-fs.selector" . | nindent 14 }}
{{- end -}}
{{- end -}}
