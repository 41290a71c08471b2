{{/*
What Helm finds in the cluster: {"replicas": of the StatefulSet, 0: there is none, "settings": node 0's file, or ""}, as
JSON. Tools that only render find nothing.
*/}}
{{- define "rt.installed" -}}
{{- $set := lookup "apps/v1" "StatefulSet" (include "rt.namespace" .) (include "rt.fullname" .) -}}
{{- $files := lookup "v1" "ConfigMap" (include "rt.namespace" .) (printf "%s-config" (include "rt.fullname" .)) -}}
{{- dict "replicas" (dig "spec" "replicas" 0 $set) "settings" (dig "data" (printf "%s-0.toml" (include "rt.fullname" .)) "" $files) | toJson -}}
{{- end -}}
