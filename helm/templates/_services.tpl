{{- define "rt.service" -}}
{{- $service := .Values.service -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "rt.metadata" (dict "root" . "name" (include "rt.fullname" .) "component" "node" "labels" $service.labels "annotations" $service.annotations) | nindent 2 }}
spec:
  type: {{ $service.type }}
  {{- range $key := list "clusterIP" "loadBalancerClass" "externalTrafficPolicy" "internalTrafficPolicy" "ipFamilyPolicy" "sessionAffinity" }}
  {{- with get $service $key }}
  {{ $key }}: {{ . }}
  {{- end }}
  {{- end }}
  {{- range $key := list "loadBalancerSourceRanges" "ipFamilies" }}
  {{- with get $service $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  selector:
    {{- include "rt.selector" (dict "root" . "component" "node") | nindent 4 }}
  ports:
    {{- range $name := list "data" "rest" }}
    - name: {{ $name }}
      port: {{ int (get $.Values.ports $name) }}
      targetPort: {{ $name }}
      protocol: TCP
      {{- if and (ne $service.type "ClusterIP") (get $service.nodePorts $name) }}
      nodePort: {{ int (get $service.nodePorts $name) }}
      {{- end }}
    {{- end }}
{{- end -}}

{{/* The nodes must find each other before any of them is ready. */}}
{{- define "rt.headlessService" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "rt.metadata" (dict "root" . "name" (include "rt.headless" .) "component" "node" "labels" (dict "rt/headless" "true") "annotations" .Values.headlessService.annotations) | nindent 2 }}
spec:
  type: ClusterIP
  clusterIP: None
  publishNotReadyAddresses: true
  {{- range $key := list "ipFamilyPolicy" }}
  {{- with get $.Values.service $key }}
  {{ $key }}: {{ . }}
  {{- end }}
  {{- end }}
  {{- with .Values.service.ipFamilies }}
  ipFamilies:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  selector:
    {{- include "rt.selector" (dict "root" . "component" "node") | nindent 4 }}
  ports:
    {{- range $name := list "data" "raft" "rest" "health" }}
    - name: {{ $name }}
      port: {{ int (get $.Values.ports $name) }}
      targetPort: {{ $name }}
      protocol: TCP
    {{- end }}
{{- end -}}
