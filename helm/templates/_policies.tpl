{{- define "rt.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "rt.metadata" (dict "root" . "name" (include "rt.fullname" .) "component" "node") | nindent 2 }}
spec:
  maxUnavailable: {{ .Values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "rt.selector" (dict "root" . "component" "node") | nindent 6 }}
{{- end -}}

{{/* To where names are looked up: policies see the port behind a service, which is 5353 on OpenShift. */}}
{{- define "rt.dnsEgress" -}}
- ports:
    {{- range $port := list 53 5353 }}
    - port: {{ $port }}
      protocol: UDP
    - port: {{ $port }}
      protocol: TCP
    {{- end }}
{{- end -}}

{{- define "rt.networkPolicy" -}}
{{- $nodes := include "rt.selector" (dict "root" . "component" "node") | fromYaml -}}
{{- $tests := include "rt.selector" (dict "root" . "component" "test") | fromYaml -}}
{{- $scaling := include "rt.selector" (dict "root" . "component" "scaling") | fromYaml -}}
{{- $ports := .Values.ports -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "rt.metadata" (dict "root" . "name" (include "rt.fullname" .) "component" "node") | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- toYaml $nodes | nindent 6 }}
  policyTypes:
    - Ingress
    - Egress
  ingress:
    - ports:
        - port: {{ int $ports.data }}
          protocol: TCP
        - port: {{ int $ports.rest }}
          protocol: TCP
      {{- with .Values.networkPolicy.from }}
      from:
        - podSelector:
            matchLabels:
              {{- toYaml $nodes | nindent 14 }}
        - podSelector:
            matchLabels:
              {{- toYaml $tests | nindent 14 }}
        - podSelector:
            matchLabels:
              {{- toYaml $scaling | nindent 14 }}
        {{- tpl (toYaml .) $ | nindent 8 }}
      {{- end }}
    - ports:
        - port: {{ int $ports.raft }}
          protocol: TCP
      from:
        - podSelector:
            matchLabels:
              {{- toYaml $nodes | nindent 14 }}
    - ports:
        - port: {{ int $ports.health }}
          protocol: TCP
      {{- with .Values.networkPolicy.metricsFrom }}
      from:
        {{- tpl (toYaml .) $ | nindent 8 }}
      {{- end }}
    {{- with .Values.networkPolicy.extraIngress }}
    {{- tpl (toYaml .) $ | nindent 4 }}
    {{- end }}
  egress:
    {{- include "rt.dnsEgress" . | nindent 4 }}
    - ports:
        - port: {{ int $ports.data }}
          protocol: TCP
        - port: {{ int $ports.raft }}
          protocol: TCP
      to:
        - podSelector:
            matchLabels:
              {{- toYaml $nodes | nindent 14 }}
    {{- with .Values.networkPolicy.extraEgress }}
    {{- tpl (toYaml .) $ | nindent 4 }}
    {{- end }}
{{- end -}}
