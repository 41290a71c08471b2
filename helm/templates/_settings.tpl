{{/*
A node's file in two parts: the settings, whose checksum is in the pods' annotations, and the members, which are not in
it. TOML's basic strings are JSON's.
*/}}

{{- define "rt.settings" -}}
{{- $config := .Values.config -}}
stream = {{ include "rt.stream" . | toJson }}
directory = "/var/lib/rt/node"
data_port = {{ int .Values.ports.data }}
raft_port = {{ int .Values.ports.raft }}
rest_port = {{ int .Values.ports.rest }}
health_port = {{ int .Values.ports.health }}
log_level = {{ $config.logLevel | toJson }}
log_format = {{ $config.logFormat | toJson }}
{{- with $config.rollBytes }}
roll_bytes = {{ . | toString | toJson }}
{{- end }}
{{- if not (kindIs "invalid" $config.rollMinutes) }}
roll_minutes = {{ int64 $config.rollMinutes }}
{{- end }}
{{- if not (kindIs "invalid" $config.retention.minutes) }}
retention_minutes = {{ int64 $config.retention.minutes }}
{{- end }}
{{- with $config.retention.bytes }}
retention_bytes = {{ . | toString | toJson }}
{{- end }}
{{- if not (kindIs "invalid" $config.retention.diskPercent) }}
retention_disk_percent = {{ int64 $config.retention.diskPercent }}
{{- end }}
{{- with $config.retention.holdBytesMax }}
hold_bytes_max = {{ . | toString | toJson }}
{{- end }}
{{- range $key, $value := $config.extra }}
{{ $key }} = {{ if kindIs "string" $value }}{{ tpl $value $ | toJson }}{{ else if kindIs "bool" $value }}{{ $value }}{{ else }}{{ int64 $value }}{{ end }}
{{- end }}
{{- end -}}

{{/*
How many nodes made the cluster, the first ones. Their list is in force until the first change of the members, and a node
that has none of it refuses another one. So it stays what it was when the release was installed.
*/}}
{{- define "rt.founders" -}}
{{- $found := regexFindAll "(?m)^\\[members\\." (include "rt.installed" . | fromJson).settings -1 | len -}}
{{- if not (kindIs "invalid" .Values.initialReplicaCount) -}}
{{- int .Values.initialReplicaCount -}}
{{- else -}}
{{- default (int .Values.replicaCount) $found -}}
{{- end -}}
{{- end -}}

{{/*
The members in the file of a node: {root, ordinal}. Nodes that were added wait until they are members. If there are other
nodes than those that made the cluster, no node may make one: the first ones, with empty disks, do not know of the others.
*/}}
{{- define "rt.members" -}}
{{- $root := .root -}}
{{- $founders := include "rt.founders" $root | int -}}
{{- $ordinals := until $founders -}}
{{- if not (has (int .ordinal) $ordinals) -}}
{{- $ordinals = append $ordinals (int .ordinal) -}}
{{- end }}
bootstrap = {{ and $root.Values.bootstrap (eq $founders (int $root.Values.replicaCount)) (lt (int .ordinal) $founders) }}
{{- range $ordinal := $ordinals }}
{{- $host := include "rt.host" (dict "root" $root "ordinal" $ordinal) }}

[members.{{ printf "%s-%d" (include "rt.fullname" $root) $ordinal | toJson }}]
raft = {{ printf "%s:%d" $host (int $root.Values.ports.raft) | toJson }}
data = {{ printf "%s:%d" $host (int $root.Values.ports.data) | toJson }}
{{- end }}
{{- end -}}

{{- define "rt.configMap" -}}
{{- default (printf "%s-config" (include "rt.fullname" .)) .Values.existingConfigMap -}}
{{- end -}}

{{/* Where clients inside the cluster reach the nodes: host:port, … */}}
{{- define "rt.endpoints" -}}
{{- $endpoints := list -}}
{{- range $ordinal := until (int .Values.replicaCount) -}}
{{- $endpoints = append $endpoints (printf "%s:%d" (include "rt.host" (dict "root" $ "ordinal" $ordinal)) (int $.Values.ports.data)) -}}
{{- end -}}
{{- join "," $endpoints -}}
{{- end -}}
