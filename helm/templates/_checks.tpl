{{/* What the schema cannot say. Each refusal says what to change. */}}
{{- define "rt.checks" -}}
{{- $values := .Values -}}
{{- if not (has (int $values.replicaCount) (list 1 3 5 7)) -}}
{{- fail (printf "replicaCount: a stream has 1, 3, 5 or 7 nodes, not %v: an even one survives no more than the next smaller." $values.replicaCount) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "rt.fullname" .)) -}}
{{- fail (printf "fullnameOverride: the name %s cannot be a service's: a letter, then letters, digits and dashes." (include "rt.fullname" .)) -}}
{{- end -}}
{{- $spare := div (sub (int $values.replicaCount) 1) 2 | int -}}
{{- $most := $values.podDisruptionBudget.maxUnavailable -}}
{{- if and $values.podDisruptionBudget.enabled (gt $spare 0) (not (kindIs "string" $most)) (gt (int $most) $spare) -}}
{{- fail (printf "podDisruptionBudget.maxUnavailable: the stream stands still without more than %d of its nodes." $spare) -}}
{{- end -}}
{{- if and $values.persistence.existingClaim (gt (int $values.replicaCount) 1) -}}
{{- fail "persistence.existingClaim: nodes share no volume: it goes with replicaCount=1 only." -}}
{{- end -}}
{{- if and $values.tls.clients (eq $values.tls.source "existingSecret") -}}
{{- fail "tls.clients: with tls.source=existingSecret nothing makes certificates: issue them where you issued those of the nodes." -}}
{{- end -}}
{{- if and $values.tls.ca.secret $values.tls.ca.configMap -}}
{{- fail "tls.ca: secret or configMap, not both." -}}
{{- end -}}
{{- range $values.tls.clients -}}
{{- if eq (lower .name) "ca" -}}
{{- fail (printf "tls.clients: %s is the name of the CA's own files: take another." .name) -}}
{{- end -}}
{{- if and .dedupIds (ne .role "publisher") -}}
{{- fail (printf "tls.clients: only publishers have dedup ids, and %s is a %s." .name .role) -}}
{{- end -}}
{{- if and .leases (eq .role "operator") -}}
{{- fail (printf "tls.clients: only publishers and subscribers hold leases, and %s is an %s." .name .role) -}}
{{- end -}}
{{- end -}}
{{- $external := $values.externalAccess -}}
{{- if $external.enabled -}}
{{- range $key := list "hosts" "nodePorts" "loadBalancerIPs" -}}
{{- $given := len (get $external $key) -}}
{{- if and $given (ne $given (int $values.replicaCount)) -}}
{{- fail (printf "externalAccess.%s: one for each of the %d nodes, or none; these are %d." $key (int $values.replicaCount) $given) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $values.service.type "ClusterIP") $values.service.externalTrafficPolicy -}}
{{- fail "service.externalTrafficPolicy: goes with service.type NodePort or LoadBalancer only." -}}
{{- end -}}
{{- if and (ne $values.service.type "LoadBalancer") (or $values.service.loadBalancerClass $values.service.loadBalancerSourceRanges) -}}
{{- fail "service.loadBalancerClass, loadBalancerSourceRanges: go with service.type LoadBalancer only." -}}
{{- end -}}
{{- if ge (int $values.tls.selfSigned.renewDays) (int $values.tls.selfSigned.days) -}}
{{- fail "tls.selfSigned.renewDays: fewer than days, or certificates are renewed each time." -}}
{{- end -}}
{{- if gt (add (int $values.preStopSeconds) 20) (int $values.terminationGracePeriodSeconds) -}}
{{- fail "terminationGracePeriodSeconds: at least preStopSeconds and 20, which a node may take to stop." -}}
{{- end -}}
{{- $set := splitList " " "stream name directory members ca cert key bootstrap data_port raft_port rest_port health_port log_level log_format roll_bytes roll_minutes retention_minutes retention_bytes retention_disk_percent hold_bytes_max" -}}
{{- range $key, $_ := $values.config.extra -}}
{{- if has $key $set -}}
{{- fail (printf "config.extra.%s: the chart sets it itself, by a value of its own." $key) -}}
{{- end -}}
{{- end -}}
{{- $ports := list -}}
{{- range $name := list "data" "raft" "rest" "health" -}}
{{- $port := int (get $values.ports $name) -}}
{{- if has $port $ports -}}
{{- fail (printf "ports: %d is taken twice." $port) -}}
{{- end -}}
{{- $ports = append $ports $port -}}
{{- end -}}
{{- $settings := (include "rt.installed" . | fromJson).settings -}}
{{- if and $settings (not $values.existingConfigMap) -}}
{{- $stream := printf "stream = %s" (include "rt.stream" . | toJson) -}}
{{- if not (hasPrefix (printf "%s\n" $stream) $settings) -}}
{{- fail (printf "stream: the volumes belong to %s and cannot be changed to %s: install another release." (regexFind "stream = .*" $settings) $stream) -}}
{{- end -}}
{{- end -}}
{{- end -}}
