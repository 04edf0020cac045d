{{- define "pdserve.instanceCheck" -}}
{{- if eq .Values.instance.probe "grpc" -}}
{{- if .Values.tls.enabled -}}
{{- fail "instance.probe is grpc, but with tls.enabled it must be http: the kubelet has no certificate for gRPC" -}}
{{- end -}}
grpc: {port: {{ .Values.instance.port }}}
{{- else -}}
httpGet: {path: /health, port: {{ .Values.instance.httpPort }}}
{{- end -}}
{{- end -}}

{{- /* The check fails until the instance serves, and later while its engine makes no progress. */ -}}
{{- define "pdserve.instanceProbes" -}}
startupProbe:
  {{- include "pdserve.instanceCheck" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
  # The time to wait for the table and to load the model.
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
  # The time to wait for the table.
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
