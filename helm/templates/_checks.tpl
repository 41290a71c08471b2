{{/* What the schema cannot say. Each refusal says what to change. */}}
{{- define "rt.checks" -}}
{{- $values := .Values -}}
{{- if not (has (int $values.replicaCount) (list 1 3 5 7)) -}}
{{- fail (printf "replicaCount: a stream has 1, 3, 5 or 7 nodes, not %v: an even one survives no more than the next smaller." $values.replicaCount) -}}
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
{{- if and .dedupIds (ne .role "publisher") -}}
{{- fail (printf "tls.clients: only publishers have dedup ids, and %s is a %s." .name .role) -}}
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
{{- $ports := list -}}
{{- range $name := list "data" "raft" "rest" "health" -}}
{{- $port := int (get $values.ports $name) -}}
{{- if has $port $ports -}}
{{- fail (printf "ports: %d is taken twice." $port) -}}
{{- end -}}
{{- $ports = append $ports $port -}}
{{- end -}}
{{- $installed := lookup "apps/v1" "StatefulSet" (include "rt.namespace" .) (include "rt.fullname" .) -}}
{{- if $installed -}}
{{- $now := int $installed.spec.replicas -}}
{{- if not (has $now (list 0 1 (int $values.replicaCount))) -}}
{{- fail (printf "replicaCount: this stream has %d nodes and cannot be changed to %d; only a stream of one node grows." $now (int $values.replicaCount)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
