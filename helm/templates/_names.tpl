{{/* Names, labels and images. Selectors are name, instance and component: nothing in them ever changes. */}}

{{- define "rt.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough that "-certificates" behind it makes a name for a CronJob, of 52 characters at most. */}}
{{- define "rt.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 38 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 38 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 38 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "rt.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{- define "rt.stream" -}}
{{- default (include "rt.fullname" .) .Values.stream -}}
{{- end -}}

{{- define "rt.headless" -}}
{{- printf "%s-headless" (include "rt.fullname" .) -}}
{{- end -}}

{{/* The host name of a node: {root, ordinal}. */}}
{{- define "rt.host" -}}
{{- $full := include "rt.fullname" .root -}}
{{- printf "%s-%d.%s.%s.svc.%s" $full (int .ordinal) (include "rt.headless" .root) (include "rt.namespace" .root) .root.Values.clusterDomain -}}
{{- end -}}

{{- define "rt.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* {root, component} */}}
{{- define "rt.selector" -}}
app.kubernetes.io/name: {{ include "rt.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* {root, component, labels?} */}}
{{- define "rt.labels" -}}
{{- $own := dict
  "helm.sh/chart" (include "rt.chart" .root)
  "app.kubernetes.io/version" (.root.Chart.AppVersion | toString)
  "app.kubernetes.io/managed-by" .root.Release.Service
  "app.kubernetes.io/part-of" "rt" -}}
{{- $labels := mergeOverwrite (dict) .root.Values.commonLabels (default dict .labels) $own (include "rt.selector" . | fromYaml) -}}
{{- toYaml $labels -}}
{{- end -}}

{{/* The metadata of an object: {root, name, component, labels?, annotations?} */}}
{{- define "rt.metadata" -}}
name: {{ .name }}
namespace: {{ include "rt.namespace" .root }}
labels:
  {{- include "rt.labels" . | nindent 2 }}
{{- with mergeOverwrite (dict) .root.Values.commonAnnotations (default dict .annotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* An object with the user's own laid over it: {root, body: the template that makes it, merge} */}}
{{- define "rt.object" -}}
{{- $object := include .body .root | fromYaml -}}
{{- if hasKey $object "Error" -}}
{{- fail (printf "%s: %s" .body (get $object "Error")) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $object (deepCopy .merge)) -}}
{{- end -}}

{{- define "rt.image" -}}
{{- $image := .Values.image -}}
{{- $registry := default $image.registry .Values.global.imageRegistry -}}
{{- $repository := ternary (printf "%s/%s" $registry $image.repository) $image.repository (ne $registry "") -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion $image.tag | toString) -}}
{{- end -}}
{{- end -}}

{{- define "rt.pullSecrets" -}}
{{- with concat .Values.global.imagePullSecrets .Values.image.pullSecrets | uniq }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "rt.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "rt.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}
