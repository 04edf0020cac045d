{{- define "pdserve.instanceCheck" -}}
{{- if eq .Values.instance.probe "grpc" -}}
{{- if .Values.tls.enabled -}}
{{- fail "instance.probe is grpc, and the kubelet has no certificate to ask with: give instance.probe http with tls.enabled" -}}
{{- end -}}
grpc: {port: {{ .Values.instance.port }}}
{{- else -}}
httpGet: {path: /health, port: {{ .Values.instance.httpPort }}}
{{- end -}}
{{- end -}}

{{- /* Before it serves, an instance says that it does not; then, when its engine makes no progress. */ -}}
{{- define "pdserve.instanceProbes" -}}
startupProbe:
  {{- include "pdserve.instanceCheck" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
  # Waiting for the table, and loading.
  failureThreshold: {{ div (add .Values.table.waitSeconds .Values.instance.startupSeconds) 5 }}
readinessProbe:
  {{- include "pdserve.instanceCheck" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
livenessProbe:
  {{- include "pdserve.instanceCheck" . | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "pdserve.schedulerProbes" -}}
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 2
  timeoutSeconds: 3
  # Waiting for the table.
  failureThreshold: {{ div (add .Values.table.waitSeconds 60) 2 }}
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 5
  timeoutSeconds: 3
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}
