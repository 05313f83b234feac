{{- define "driftguard.name" -}}
{{- if contains "driftguard" .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-driftguard" .Release.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "driftguard.selector" -}}
app.kubernetes.io/name: driftguard
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "driftguard.labels" -}}
{{ include "driftguard.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "driftguard.image" -}}
{{ required "image.repository: where the image of the sidecar was pushed" .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Not empty where driftguard.toml has sources itself. */}}
{{- define "driftguard.sourcesInSettings" -}}
{{- if regexMatch "(?m)^[ \t]*(\\[\\[[ \t]*sources|sources[ \t]*=)" (.Values.settings | default "") }}yes{{ end }}
{{- end }}

{{- /* Of the containers alike. A Service's DRIFTGUARD_PORT would be a setting: enableServiceLinks stays false. */}}
{{- define "driftguard.container" -}}
image: {{ include "driftguard.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - name: DRIFTGUARD_DATABASE_URL
    valueFrom: {secretKeyRef: {name: {{ .Values.secretName }}, key: database-url}}
  - name: DRIFTGUARD_API_KEY
    valueFrom: {secretKeyRef: {name: {{ .Values.secretName }}, key: api-key}}
  - {name: DRIFTGUARD_CONFIG, value: /etc/driftguard/driftguard.toml}
  - {name: DRIFTGUARD_DATA_DIR, value: /var/lib/driftguard/data} # every user may write into an emptyDir itself
  {{- with .Values.externalUrl }}
  - {name: DRIFTGUARD_ALERTING__EXTERNAL_URL, value: {{ . | quote }}}
  {{- end }}
  {{- with .Values.grafanaUrl }}
  - {name: DRIFTGUARD_ALERTING__GRAFANA_URL, value: {{ . | quote }}}
  {{- end }}
  {{- with .Values.environment }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .Values.sources }}{{/* behind `environment`, whose variables stand in it as $(NAME) */}}
  - {name: DRIFTGUARD_SOURCES, value: {{ toJson . | quote }}}
  {{- end }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: settings, mountPath: /etc/driftguard, readOnly: true}
  - {name: data, mountPath: /var/lib/driftguard}
  - {name: tmp, mountPath: /tmp}
  {{- with .Values.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* (name of a value, URL): fails where its port is none. */}}
{{- define "driftguard.checkPort" -}}
{{- $port := regexReplaceAll "^[^/]+//[^/?#]*:([0-9]+)([/?#].*)?$" (index . 1) "${1}" }}
{{- if and (regexMatch "^[0-9]+$" $port) (gt (int64 $port) 65535) }}
{{- fail (printf "%s: the port of %s is above 65535" (index . 0) (index . 1)) }}
{{- end }}
{{- end }}

{{- /* Fails where Kubernetes or the sidecar would not take the values, which the schema cannot say or not as clearly. */}}
{{- define "driftguard.check" -}}
{{- include "driftguard.checkPort" (list "externalUrl" (.Values.externalUrl | default "")) }}
{{- include "driftguard.checkPort" (list "grafanaUrl" (.Values.grafanaUrl | default "")) }}
{{- range .Values.sources }}
{{- include "driftguard.checkPort" (list "sources" .url) }}
{{- end }}
{{- if regexMatch "^[0-9]" .Release.Name }}
{{- fail (printf "the release %s: its name has to begin with a letter, as that of its Service" .Release.Name) }}
{{- end }}
{{- $replicas := int .Values.replicas }}
{{- if gt $replicas 1 }}
{{- $least := toString .Values.podDisruptionBudget.minAvailable }}
{{- $stay := int (trimSuffix "%" $least) }}
{{- if hasSuffix "%" $least }}{{ $stay = div (add (mul $stay $replicas) 99) 100 }}{{ end }}
{{- if ge (int $stay) $replicas }}
{{- fail (printf "podDisruptionBudget.minAvailable: %s of %d replicas are all, and no node could ever be drained" $least $replicas) }}
{{- end }}
{{- end }}
{{- end }}
