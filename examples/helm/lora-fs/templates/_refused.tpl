{{- /* What each value alone may be, and together does not work: a schema cannot compare. */ -}}
{{- define "lora-fs.refused" -}}
{{- $v := .Values -}}
{{- $engine := $v.engine -}}
{{- $given := ternary 2 $v.replicas (kindIs "invalid" $v.replicas) -}}{{- /* null: what scales them may want a second */ -}}
{{- $replicas := ternary $v.autoscaling.maxReplicas $given $v.autoscaling.enabled | int -}}
{{- if regexMatch "^[0-9]" .Release.Name -}}
{{- fail (printf "the release's name (%s) begins with a digit, and Kubernetes refuses a Service of that name: begin it with a letter, as lora-%s" .Release.Name .Release.Name) -}}
{{- end -}}
{{- if and (eq $v.mode "sidecar") (gt (int $engine.maxLoras) (int $engine.maxCpuLoras)) -}}
{{- fail (printf "engine.maxLoras (%v) is over engine.maxCpuLoras (%v): vLLM does not start; raise engine.maxCpuLoras" $engine.maxLoras $engine.maxCpuLoras) -}}
{{- end -}}
{{- if and (eq $v.mode "sidecar") (gt (int $v.sidecar.maxLoaded) (int $engine.maxCpuLoras)) -}}
{{- fail (printf "sidecar.maxLoaded (%v) is over engine.maxCpuLoras (%v): the engine would read adapters again while it serves; lower it or raise engine.maxCpuLoras" $v.sidecar.maxLoaded $engine.maxCpuLoras) -}}
{{- end -}}
{{- if and (not $v.storage.existingClaim) (gt $replicas 1) (not (has "ReadWriteMany" $v.storage.accessModes)) -}}
{{- fail (printf "%d replicas cannot mount one ReadWriteOnce volume from several nodes: set storage.accessModes to [ReadWriteMany], or replicas to 1" $replicas) -}}
{{- end -}}
{{- if and (not $v.storage.existingClaim) (not (has "ReadWriteMany" $v.storage.accessModes)) (ne (toString $v.strategy.maxSurge) "0") -}}
{{- fail "an upgrade's second pod cannot mount one ReadWriteOnce volume from another node, and waits for ever: set strategy.maxSurge to 0 and strategy.maxUnavailable to 1" -}}
{{- end -}}
{{- with $v.strategy -}}
{{- if and (eq (toString .maxUnavailable | trimSuffix "%") "0") (eq (toString .maxSurge | trimSuffix "%") "0") -}}
{{- fail "strategy.maxUnavailable and strategy.maxSurge are both 0, and an upgrade would change no pod: set one of them to 1" -}}
{{- end -}}
{{- end -}}
{{- if and $v.autoscaling.enabled (gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas (%v) is over autoscaling.maxReplicas (%v)" $v.autoscaling.minReplicas $v.autoscaling.maxReplicas) -}}
{{- end -}}
{{- if and $v.storage.readOnly $v.nim.claim -}}
{{- fail "storage.readOnly does not go with nim.claim: what lies in that store is registered by the pods; set storage.readOnly to false" -}}
{{- end -}}
{{- if and $v.apply.documents $v.apply.existingConfigMap -}}
{{- fail "apply.documents and apply.existingConfigMap exclude each other: leave one of them empty" -}}
{{- end -}}
{{- if and $v.trust.files $v.trust.existingConfigMap -}}
{{- fail "trust.files and trust.existingConfigMap exclude each other: leave one of them empty" -}}
{{- end -}}
{{- if and $v.trust.files (not (hasKey $v.trust.files "trust.yaml")) -}}
{{- fail "trust.files has no trust.yaml: that is the file that names who may sign" -}}
{{- end -}}
{{- range $part := list "sidecar" "gateway" -}}
{{- range (get $v $part).env -}}
{{- if eq .name "LORA_FS_ADMIN_PORT" -}}
{{- fail (printf "%s.env sets LORA_FS_ADMIN_PORT, which probes, Services and the NetworkPolicy do not follow: set %s.adminPort" $part $part) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $v.gateway.adminPort -}}
{{- if not $v.gateway.enabled -}}
{{- fail "gateway.adminPort is set, and gateway.enabled is false: set that to true, or sidecar.adminPort" -}}
{{- end -}}
{{- if $v.sidecar.adminPort -}}
{{- fail "gateway.adminPort and sidecar.adminPort exclude each other: a gateway passes no operation on to a replica that has a port for them; set one of them to null" -}}
{{- end -}}
{{- if eq (int .) 8001 -}}
{{- fail "gateway.adminPort (8001) is the gateway's port for requests: set another one, as 8002" -}}
{{- end -}}
{{- end -}}
{{- range concat ($v.sidecar.env | default list) ($v.gateway.env | default list) -}}
{{- if eq .name "LORA_FS_PORT" -}}
{{- fail "sidecar.env or gateway.env sets LORA_FS_PORT, which probes, Services and the NetworkPolicy do not follow: leave it out; service.port is the clients' port" -}}
{{- end -}}
{{- end -}}
{{- with $v.sidecar.adminPort -}}
{{- if eq $v.mode "plugin" -}}
{{- fail "sidecar.adminPort does not go with mode plugin: vLLM's port is the only one there; set it to null" -}}
{{- end -}}
{{- if has (int .) (list 8000 8001) -}}
{{- fail (printf "sidecar.adminPort (%v) is taken in the pod, by vLLM (8000) or by requests (8001): set another one, as 8002" .) -}}
{{- end -}}
{{- end -}}
{{- range $engine.args -}}
{{- if hasPrefix "--shutdown-timeout=" . -}}
{{- $given := trimPrefix "--shutdown-timeout=" . | int -}}
{{- if gt (add $given 30) (int $v.terminationGracePeriodSeconds) -}}
{{- fail (printf "engine.args: --shutdown-timeout=%d does not fit terminationGracePeriodSeconds (%v): requests would be cut; set that to %d or more" $given $v.terminationGracePeriodSeconds (add $given 30)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if ge (include "lora-fs.stageBytes" . | int64) (include "lora-fs.bytes" $v.stage.sizeLimit | int64) -}}
{{- fail (printf "stage.maxBytes (%v) is not below stage.sizeLimit (%s): the pod would be evicted; leave stage.maxBytes empty" $v.stage.maxBytes $v.stage.sizeLimit) -}}
{{- end -}}
{{- end -}}
