{{- /* Names, labels and the parts that several objects share. Each takes the root, unless a comment says otherwise. */ -}}

{{- define "pdserve.name" -}}
{{- if contains "pdserve" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-pdserve" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "pdserve.selector" -}}
app.kubernetes.io/name: pdserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "pdserve.labels" -}}
{{ include "pdserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "pdserve.image" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{- define "pdserve.parts" -}}{{ include "pdserve.name" . }}-parts{{- end -}}
{{- define "pdserve.ranktable" -}}{{ include "pdserve.name" . }}-ranktable{{- end -}}
{{- define "pdserve.member" -}}{{ include "pdserve.name" . }}-member{{- end -}}
{{- define "pdserve.writer" -}}{{ include "pdserve.name" . }}-table-writer{{- end -}}

{{- define "pdserve.secret" -}}
{{- .Values.clusterSecret.existing | default (printf "%s-cluster-secret" (include "pdserve.name" .)) -}}
{{- end -}}

{{- define "pdserve.resource" -}}
{{- if eq .Values.device.type "npu" -}}
{{- .Values.device.resource | default "huawei.com/Ascend910" -}}
{{- else if eq .Values.device.type "cuda" -}}
{{- .Values.device.resource | default "nvidia.com/gpu" -}}
{{- end -}}
{{- end -}}

{{- define "pdserve.model" -}}
{{- .Values.model.path | default "/work/state/cache/models/SmolLM2-135M-Instruct" -}}
{{- end -}}

{{- /* The flags that every process of the cluster gets: the model's, and those in `args`. */ -}}
{{- define "pdserve.modelArgs" -}}
- --model={{ include "pdserve.model" . }}
{{- if .Values.model.name }}
- --served-model-name={{ .Values.model.name }}
{{- else if not .Values.model.path }}
- --served-model-name=SmolLM2-135M-Instruct
{{- end }}
{{- range .Values.args }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- /* uid 1000 is the image's ma-user, to whom the cards of a node belong. */ -}}
{{- define "pdserve.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "pdserve.security" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* Takes a role's own values. */ -}}
{{- define "pdserve.placing" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- end -}}

{{- /* Takes root, resources and devices (0 for none), which are requested under the device plugin's name. */ -}}
{{- define "pdserve.resources" -}}
resources:
  requests:
    {{- range $name, $amount := .resources.requests }}
    {{ $name }}: {{ $amount | quote }}
    {{- end }}
    {{- if and .devices (include "pdserve.resource" .root) }}
    {{ include "pdserve.resource" .root }}: {{ .devices | quote }}
    {{- end }}
  {{- if or .resources.limits (and .devices (include "pdserve.resource" .root)) }}
  limits:
    {{- range $name, $amount := .resources.limits }}
    {{ $name }}: {{ $amount | quote }}
    {{- end }}
    {{- if and .devices (include "pdserve.resource" .root) }}
    {{ include "pdserve.resource" .root }}: {{ .devices | quote }}
    {{- end }}
  {{- end }}
{{- end -}}

{{- /* The volume with a pod's certificate, key and authority: a Secret, or the one in `tls.volume`. */ -}}
{{- define "pdserve.tlsVolume" -}}
{{- if .Values.tls.volume -}}
{{- toYaml .Values.tls.volume -}}
{{- else if .Values.tls.existing -}}
secret: {secretName: {{ .Values.tls.existing }}, defaultMode: 288}
{{- else -}}
{{- fail "tls.existing is empty: name a Secret with tls.crt, tls.key and ca.crt, or set tls.volume" -}}
{{- end -}}
{{- end -}}
