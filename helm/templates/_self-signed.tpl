{{/*
What tls.source=selfSigned wants: a file for `rt certs kubernetes`. Helm's own functions make no URI SANs, and keys that
it made would stay in every revision of the release.
*/}}
{{- define "rt.wantedFile" -}}
{{- $own := .Values.tls.selfSigned -}}
{{- $wanted := (include "rt.wanted" . | fromJson).wanted -}}
{{- dict "stream" (include "rt.stream" .) "ca" (printf "%s-ca" (include "rt.tlsPrefix" .)) "days" (int $own.days) "renew_days" (int $own.renewDays) "certificates" $wanted | toPrettyJson -}}
{{- end -}}

{{- define "rt.certificatesPod" -}}
{{- $labels := mergeOverwrite (dict) .Values.commonLabels (include "rt.selector" (dict "root" . "component" "certificates") | fromYaml) -}}
metadata:
  labels:
    {{- toYaml $labels | nindent 4 }}
  annotations:
    {{- mergeOverwrite (dict) .Values.commonAnnotations (dict "checksum/wanted" (include "rt.wantedFile" . | sha256sum)) | toYaml | nindent 4 }}
spec:
  serviceAccountName: {{ include "rt.fullname" . }}-certificates
  automountServiceAccountToken: false
  enableServiceLinks: false
  restartPolicy: OnFailure
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  {{- include "rt.pullSecrets" . | nindent 2 }}
  {{- include "rt.placing" . | nindent 2 }}
  containers:
    - name: certificates
      image: {{ include "rt.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command:
        - rt
        - certs
        - kubernetes
        - /etc/rt/wanted/wanted.json
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      resources:
        {{- toYaml .Values.tls.selfSigned.resources | nindent 8 }}
      volumeMounts:
        - name: wanted
          mountPath: /etc/rt/wanted
          readOnly: true
        - name: api
          mountPath: /var/run/secrets/kubernetes.io/serviceaccount
          readOnly: true
        - name: tmp
          mountPath: /tmp
  volumes:
    - name: wanted
      configMap:
        name: {{ include "rt.fullname" . }}-certificates
    # The only token there is: short-lived, for this pod, and for what its Role names.
    - name: api
      projected:
        defaultMode: 0440
        sources:
          - serviceAccountToken:
              path: token
              expirationSeconds: 3600
          - configMap:
              name: kube-root-ca.crt
              items:
                - key: ca.crt
                  path: ca.crt
          - downwardAPI:
              items:
                - path: namespace
                  fieldRef:
                    fieldPath: metadata.namespace
    - name: tmp
      emptyDir:
        medium: Memory
        sizeLimit: 16Mi
{{- end -}}
