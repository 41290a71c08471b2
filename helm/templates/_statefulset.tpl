{{- define "rt.statefulSet" -}}
{{- $node := dict "root" . "component" "node" -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  {{- include "rt.metadata" (dict "root" . "name" (include "rt.fullname" .) "component" "node") | nindent 2 }}
spec:
  replicas: {{ int .Values.replicaCount }}
  serviceName: {{ include "rt.headless" . }}
  # A majority has to be there before any of them is ready.
  podManagementPolicy: Parallel
  updateStrategy:
    {{- toYaml .Values.updateStrategy | nindent 4 }}
  minReadySeconds: {{ int .Values.minReadySeconds }}
  revisionHistoryLimit: {{ int .Values.revisionHistoryLimit }}
  {{- if and .Values.persistence.enabled (semverCompare ">=1.27.0-0" .Capabilities.KubeVersion.Version) }}
  persistentVolumeClaimRetentionPolicy:
    {{- toYaml .Values.persistence.retention | nindent 4 }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "rt.selector" $node | nindent 6 }}
  template:
    metadata:
      labels:
        {{- /* Without the chart's version: another chart alone is no reason to restart. */}}
        {{- mergeOverwrite (dict) .Values.commonLabels .Values.podLabels (include "rt.selector" $node | fromYaml) | toYaml | nindent 8 }}
      annotations:
        {{- if and .Values.configChecksumAnnotation (not .Values.existingConfigMap) }}
        checksum/config: {{ include "rt.settings" . | sha256sum }}
        {{- end }}
        kubectl.kubernetes.io/default-container: rt
        {{- with mergeOverwrite (dict) .Values.commonAnnotations .Values.podAnnotations }}
        {{- tpl (toYaml .) $ | nindent 8 }}
        {{- end }}
    spec:
      {{- include "rt.podSpec" . | nindent 6 }}
  {{- if and .Values.persistence.enabled (not .Values.persistence.existingClaim) }}
  volumeClaimTemplates:
    - apiVersion: v1
      kind: PersistentVolumeClaim
      metadata:
        name: data
        labels:
          {{- include "rt.selector" $node | nindent 10 }}
        {{- with .Values.persistence.annotations }}
        annotations:
          {{- toYaml . | nindent 10 }}
        {{- end }}
      spec:
        accessModes:
          {{- toYaml .Values.persistence.accessModes | nindent 10 }}
        {{- if eq .Values.persistence.storageClass "-" }}
        storageClassName: ""
        {{- else if .Values.persistence.storageClass }}
        storageClassName: {{ .Values.persistence.storageClass }}
        {{- end }}
        {{- with .Values.persistence.selector }}
        selector:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        resources:
          requests:
            storage: {{ .Values.persistence.size | quote }}
  {{- end }}
{{- end -}}

{{- define "rt.podSpec" -}}
{{- $values := .Values -}}
serviceAccountName: {{ include "rt.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ int $values.terminationGracePeriodSeconds }}
securityContext:
  {{- toYaml $values.podSecurityContext | nindent 2 }}
{{- include "rt.pullSecrets" . }}
{{- if $values.affinity }}
affinity:
  {{- tpl (toYaml $values.affinity) . | nindent 2 }}
{{- else if ne $values.podAntiAffinity "none" }}
affinity:
  podAntiAffinity:
    {{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "rt.selector" (dict "root" . "component" "node") | fromYaml)) }}
    {{- if eq $values.podAntiAffinity "hard" }}
    requiredDuringSchedulingIgnoredDuringExecution:
      - {{- toYaml $term | nindent 8 }}
    {{- else }}
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          {{- toYaml $term | nindent 10 }}
    {{- end }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $own := dict "labelSelector" (dict "matchLabels" (include "rt.selector" (dict "root" $ "component" "node") | fromYaml)) }}
  - {{- merge (deepCopy .) $own | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- include "rt.placing" . }}
{{- with $values.initContainers }}
initContainers:
  {{- tpl (toYaml .) $ | nindent 2 }}
{{- end }}
containers:
  - {{- include "rt.container" . | nindent 4 }}
  {{- with $values.sidecars }}
  {{- tpl (toYaml .) $ | nindent 2 }}
  {{- end }}
volumes:
  - {{- include "rt.tlsVolume" . | nindent 4 }}
  - name: config
    configMap:
      name: {{ include "rt.configMap" . }}
      defaultMode: 0440
  - name: tmp
    emptyDir:
      sizeLimit: 64Mi
  {{- if not $values.persistence.enabled }}
  - name: data
    {{- with $values.persistence.emptyDirSizeLimit }}
    emptyDir:
      sizeLimit: {{ . }}
    {{- else }}
    emptyDir: {}
    {{- end }}
  {{- else if $values.persistence.existingClaim }}
  - name: data
    persistentVolumeClaim:
      claimName: {{ $values.persistence.existingClaim }}
  {{- end }}
  {{- with $values.extraVolumes }}
  {{- tpl (toYaml .) $ | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Which hosts a pod may run on, how, and how it resolves names: the same for every pod of the chart. */}}
{{- define "rt.placing" -}}
{{- range $key := list "nodeSelector" "tolerations" "hostAliases" "dnsConfig" }}
{{- with get $.Values $key }}
{{ $key }}:
  {{- tpl (toYaml .) $ | nindent 2 }}
{{- end }}
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" "schedulerName" "dnsPolicy" }}
{{- with get $.Values $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "rt.container" -}}
{{- $values := .Values -}}
name: rt
image: {{ include "rt.image" . }}
imagePullPolicy: {{ $values.image.pullPolicy }}
securityContext:
  {{- toYaml $values.securityContext | nindent 2 }}
{{- if $values.diagnosticMode }}
command:
  - sleep
  - infinity
{{- else }}
command:
  - rt
  - node
  - --config
  - /etc/rt/config/$(RT_NAME).toml
{{- with $values.extraArgs }}
args:
  {{- range . }}
  - {{ tpl (toString .) $ | quote }}
  {{- end }}
{{- end }}
{{- end }}
env:
  # The names of certificate and member are the pod's.
  - name: RT_NAME
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  - name: RT_CA
    value: {{ include "rt.caFile" . }}
  - name: RT_CERT
    value: /etc/rt/tls/$(RT_NAME)/tls.crt
  - name: RT_KEY
    value: /etc/rt/tls/$(RT_NAME)/tls.key
  {{- with $values.extraEnv }}
  {{- tpl (toYaml .) $ | nindent 2 }}
  {{- end }}
{{- with $values.extraEnvFrom }}
envFrom:
  {{- tpl (toYaml .) $ | nindent 2 }}
{{- end }}
ports:
  {{- range $name := list "data" "raft" "rest" "health" }}
  - name: {{ $name }}
    containerPort: {{ int (get $values.ports $name) }}
    protocol: TCP
  {{- end }}
{{- if not $values.diagnosticMode }}
{{- range $key := list "startupProbe" "readinessProbe" "livenessProbe" }}
{{- with get $values $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with $values.preStopSeconds }}
lifecycle:
  preStop:
    exec:
      command:
        - sleep
        - {{ . | toString | quote }}
{{- end }}
{{- end }}
resources:
  {{- toYaml $values.resources | nindent 2 }}
volumeMounts:
  - name: data
    mountPath: /var/lib/rt
  - name: config
    mountPath: /etc/rt/config
    readOnly: true
  - name: tls
    mountPath: /etc/rt/tls
    readOnly: true
  - name: tmp
    mountPath: /tmp
  {{- with $values.extraVolumeMounts }}
  {{- tpl (toYaml .) $ | nindent 2 }}
  {{- end }}
{{- end -}}
