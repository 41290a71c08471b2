{{/*
The jobs that change the members when replicaCount changes. Both run files/scale.py, which is part of their command: a
ConfigMap of this revision is not there yet before an upgrade.
*/}}

{{- define "rt.scalingSecret" -}}
{{- $own := "" -}}
{{- if include "rt.makesCertificates" . -}}
{{- $own = printf "%s-scaling" (include "rt.fullname" .) -}}
{{- end -}}
{{- if and .Values.scaling.enabled (not .Values.diagnosticMode) -}}
{{- default $own .Values.scaling.operatorSecret -}}
{{- end -}}
{{- end -}}

{{/* The Raft port of each node that is to be a member: name=host:port, … */}}
{{- define "rt.raftAddresses" -}}
{{- $nodes := list -}}
{{- range $ordinal := until (int .Values.replicaCount) -}}
{{- $host := include "rt.host" (dict "root" $ "ordinal" $ordinal) -}}
{{- $nodes = append $nodes (printf "%s-%d=%s:%d" (include "rt.fullname" $) $ordinal $host (int $.Values.ports.raft)) -}}
{{- end -}}
{{- join "," $nodes -}}
{{- end -}}

{{/* A pod: {root, mode: remove or match, seconds, restart} */}}
{{- define "rt.scalingPod" -}}
{{- $values := .root.Values -}}
{{- $labels := mergeOverwrite (dict) $values.commonLabels (include "rt.selector" (dict "root" .root "component" "scaling") | fromYaml) -}}
metadata:
  labels:
    {{- toYaml $labels | nindent 4 }}
  {{- with $values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "rt.serviceAccount" .root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  restartPolicy: {{ .restart }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- include "rt.pullSecrets" .root | nindent 2 }}
  {{- include "rt.placing" .root | nindent 2 }}
  containers:
    - name: scaling
      image: {{ include "rt.image" .root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command:
        - python
        - -c
        - |
          {{- .root.Files.Get "files/scale.py" | nindent 10 }}
        - {{ .mode }}
      # The reason of a failure is in the status of the pod.
      terminationMessagePolicy: FallbackToLogsOnError
      env:
        - name: SCALE_NODES
          value: {{ include "rt.raftAddresses" .root | quote }}
        - name: SCALE_RAISES
          value: {{ $values.scaling.raiseFeatureLevel | quote }}
        - name: SCALE_SECONDS
          value: {{ .seconds | quote }}
        - name: RT_ENDPOINTS
          value: {{ include "rt.endpoints" .root | quote }}
        - name: RT_CA
          value: /etc/rt/tls/ca.crt
        - name: RT_CERT
          value: /etc/rt/tls/tls.crt
        - name: RT_KEY
          value: /etc/rt/tls/tls.key
      securityContext:
        {{- toYaml $values.securityContext | nindent 8 }}
      resources:
        {{- toYaml $values.scaling.resources | nindent 8 }}
      volumeMounts:
        - name: tls
          mountPath: /etc/rt/tls
          readOnly: true
        - name: tmp
          mountPath: /tmp
  volumes:
    - name: tls
      projected:
        defaultMode: 0440
        sources:
          - secret:
              name: {{ include "rt.scalingSecret" .root }}
              items:
                {{- range $key := ternary (list "tls.crt" "tls.key") (list "ca.crt" "tls.crt" "tls.key") (or $values.tls.ca.secret $values.tls.ca.configMap | not | not) }}
                - key: {{ $key }}
                  path: {{ $key }}
                {{- end }}
          {{- if $values.tls.ca.secret }}
          - secret:
              name: {{ $values.tls.ca.secret }}
              items:
                - key: {{ $values.tls.ca.key }}
                  path: ca.crt
          {{- else if $values.tls.ca.configMap }}
          - configMap:
              name: {{ $values.tls.ca.configMap }}
              items:
                - key: {{ $values.tls.ca.key }}
                  path: ca.crt
          {{- end }}
    - name: tmp
      emptyDir:
        sizeLimit: 64Mi
{{- end -}}
