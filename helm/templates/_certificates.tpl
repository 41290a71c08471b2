{{/*
Whose certificates there are: the same list for cert-manager and for the job. Identity is a URI; only nodes have
host names, and never a wildcard, with which one node could pose as another.
*/}}

{{- define "rt.tlsPrefix" -}}
{{- default (printf "%s-tls" (include "rt.fullname" .)) .Values.tls.secretPrefix -}}
{{- end -}}

{{- define "rt.makesCertificates" -}}
{{- if ne .Values.tls.source "existingSecret" -}}true{{- end -}}
{{- end -}}

{{/* {root, ordinal}: {"dns": […], "ips": […]} */}}
{{- define "rt.nodeNames" -}}
{{- $root := .root -}}
{{- $full := include "rt.fullname" $root -}}
{{- $space := include "rt.namespace" $root -}}
{{- $domain := $root.Values.clusterDomain -}}
{{- $pod := printf "%s-%d" $full (int .ordinal) -}}
{{- $dns := list $pod -}}
{{- range $service := list (printf "%s.%s" $pod (include "rt.headless" $root)) $full -}}
{{- $dns = concat $dns (list $service (printf "%s.%s" $service $space) (printf "%s.%s.svc" $service $space) (printf "%s.%s.svc.%s" $service $space $domain)) -}}
{{- end -}}
{{- $dns = append $dns "localhost" -}}
{{- $ips := list "127.0.0.1" "::1" -}}
{{- if $root.Values.externalAccess.enabled -}}
{{- $hosts := $root.Values.externalAccess.hosts -}}
{{- if lt (int .ordinal) (len $hosts) -}}
{{- $host := index $hosts (int .ordinal) -}}
{{- if or (contains ":" $host) (regexMatch "^[0-9.]+$" $host) -}}
{{- $ips = append $ips $host -}}
{{- else -}}
{{- $dns = append $dns $host -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "dns" (concat $dns $root.Values.tls.extraDnsNames | uniq) "ips" (concat $ips $root.Values.tls.extraIPAddresses | uniq) | toJson -}}
{{- end -}}

{{/* {"wanted": [{secret, role, name, dedup, lease, dns, ips}]} as JSON */}}
{{- define "rt.wanted" -}}
{{- $full := include "rt.fullname" . -}}
{{- $wanted := list -}}
{{- range $ordinal := until (int .Values.replicaCount) -}}
{{- $names := include "rt.nodeNames" (dict "root" $ "ordinal" $ordinal) | fromJson -}}
{{- $wanted = append $wanted (dict "secret" (printf "%s-%d" (include "rt.tlsPrefix" $) $ordinal) "role" "node" "name" (printf "%s-%d" $full $ordinal) "dedup" (list) "lease" (list) "dns" $names.dns "ips" $names.ips) -}}
{{- end -}}
{{- $clients := .Values.tls.clients -}}
{{- if .Values.tests.enabled -}}
{{- $clients = concat $clients (list (dict "name" "helm-test" "role" "publisher" "secret" (printf "%s-test-publisher" $full)) (dict "name" "helm-test" "role" "subscriber" "secret" (printf "%s-test-subscriber" $full))) -}}
{{- end -}}
{{- if and .Values.scaling.enabled (not .Values.scaling.operatorSecret) -}}
{{- $clients = append $clients (dict "name" "helm-scaling" "role" "operator" "secret" (printf "%s-scaling" $full)) -}}
{{- end -}}
{{- range $client := $clients -}}
{{- $secret := default (printf "%s-client-%s" $full $client.name) $client.secret -}}
{{- $wanted = append $wanted (dict "secret" $secret "role" $client.role "name" $client.name "dedup" (default list $client.dedupIds) "lease" (default list $client.leases) "dns" (list) "ips" (list)) -}}
{{- end -}}
{{- /* The CA's Secret, and the name of its Certificate. */ -}}
{{- $secrets := list (printf "%s-ca" (include "rt.tlsPrefix" .)) (printf "%s-ca" $full) -}}
{{- range $wanted -}}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$" .secret) -}}
{{- fail (printf "tls.clients: no Secret can be called %s: give that client a secret." .secret) -}}
{{- end -}}
{{- if has .secret $secrets -}}
{{- fail (printf "tls.clients: two certificates for the Secret %s: give one of them another secret." .secret) -}}
{{- end -}}
{{- $secrets = append $secrets .secret -}}
{{- end -}}
{{- dict "wanted" $wanted | toJson -}}
{{- end -}}

{{/*
The volume of the nodes' certificates. It always names seven nodes, so that a stream that grows restarts nobody; what
is not there yet is filled in by the kubelet. A file by subPath would never be renewed, so each node sees them all.
*/}}
{{- define "rt.tlsVolume" -}}
name: tls
projected:
  defaultMode: 0440
  sources:
    {{- with .Values.tls.ca }}
    {{- if .secret }}
    - secret:
        name: {{ .secret }}
        items:
          - key: {{ .key }}
            path: ca.crt
    {{- else if .configMap }}
    - configMap:
        name: {{ .configMap }}
        items:
          - key: {{ .key }}
            path: ca.crt
    {{- end }}
    {{- end }}
    {{- range $ordinal := until 7 }}
    {{- $pod := printf "%s-%d" (include "rt.fullname" $) $ordinal }}
    - secret:
        name: {{ printf "%s-%d" (include "rt.tlsPrefix" $) $ordinal }}
        optional: true
        items:
          - key: tls.crt
            path: {{ $pod }}/tls.crt
          - key: tls.key
            path: {{ $pod }}/tls.key
          {{- if not (or $.Values.tls.ca.secret $.Values.tls.ca.configMap) }}
          - key: ca.crt
            path: {{ $pod }}/ca.crt
          {{- end }}
    {{- end }}
{{- end -}}

{{- define "rt.caFile" -}}
{{- if or .Values.tls.ca.secret .Values.tls.ca.configMap -}}
/etc/rt/tls/ca.crt
{{- else -}}
/etc/rt/tls/$(RT_NAME)/ca.crt
{{- end -}}
{{- end -}}
