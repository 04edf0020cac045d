{{- /*
The pod of a member. Takes root, role (scheduler, prefill, decode) and values, the role's own.

  announce  a sidecar: sends this pod's part to the API server and fetches the cluster's table; only it has a token
  follow    replaces announce if a platform's table of another dialect has to be converted
  model     fetches the default model, if no model is named
  the role  `start` writes the part, waits for the table, and becomes start_servers.sh
*/ -}}
{{- define "pdserve.pod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $own := .values -}}
{{- $platform := $values.table.platform -}}
{{- $isInstance := ne .role "scheduler" -}}
metadata:
  labels:
    {{- include "pdserve.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    {{- range $key, $value := $own.podLabels }}
    {{ $key }}: {{ $value | quote }}
    {{- end }}
  {{- with $own.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if $platform.enabled }}
  automountServiceAccountToken: false
  {{- else }}
  serviceAccountName: {{ include "pdserve.member" $root }}
  automountServiceAccountToken: false
  {{- end }}
  enableServiceLinks: false
  {{- if $isInstance }}
  terminationGracePeriodSeconds: {{ add $values.instance.drainSeconds 20 }}
  {{- if $own.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- else }}
  terminationGracePeriodSeconds: {{ add $values.scheduler.shutdownSeconds 20 }}
  {{- end }}
  securityContext:
    {{- include "pdserve.podSecurity" $root | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "pdserve.placing" $own | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if or (not $platform.enabled) $platform.dialect (not $values.model.path) }}
  initContainers:
    {{- if not $platform.enabled }}
    - name: announce
      restartPolicy: Always
      {{- include "pdserve.image" $root | nindent 6 }}
      args:
        - python
        - -P
        - -m
        - ranktable_tools.kube
        - announce
        - --pod=$(POD_NAME)
        - --folder=/work/state/tables
        - --parts={{ include "pdserve.parts" $root }}
        - --ranktable={{ include "pdserve.ranktable" $root }}
        - --every={{ $values.table.everySeconds }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
      securityContext:
        {{- include "pdserve.security" $root | nindent 8 }}
      {{- include "pdserve.resources" (dict "root" $root "resources" $values.table.resources "devices" 0) | nindent 6 }}
      volumeMounts:
        - {name: state, mountPath: /work/state}
        - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
    {{- else if $platform.dialect }}
    - name: follow
      restartPolicy: Always
      {{- include "pdserve.image" $root | nindent 6 }}
      args:
        - python
        - -P
        - -m
        - ranktable_tools.kube
        - follow
        - --folder=/work/state/tables
        - --port={{ $values.instance.port }}
        {{- include "pdserve.platformArgs" $root | nindent 8 }}
        - --every={{ $values.table.everySeconds }}
      securityContext:
        {{- include "pdserve.security" $root | nindent 8 }}
      {{- include "pdserve.resources" (dict "root" $root "resources" $values.table.resources "devices" 0) | nindent 6 }}
      volumeMounts:
        - {name: state, mountPath: /work/state}
        - {name: platform, mountPath: {{ include "pdserve.platformFolder" $root }}, readOnly: true}
    {{- end }}
    {{- if not $values.model.path }}
    - name: model
      {{- include "pdserve.image" $root | nindent 6 }}
      args: [pdserve, model, path]
      env:
        - {name: PDSERVE_CACHE_DIR, value: /work/state/cache}
      securityContext:
        {{- include "pdserve.security" $root | nindent 8 }}
      volumeMounts:
        - {name: state, mountPath: /work/state}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .role }}
      {{- include "pdserve.image" $root | nindent 6 }}
      args:
        - python
        - -P
        - -m
        - ranktable_tools.kube
        - start
        - --role={{ .role }}
        - --folder=/work/state/tables
        - --secret=/etc/pdserve/secret/cluster_secret
        - --timeout={{ $values.table.waitSeconds }}
        - --port={{ $values.instance.port }}
        {{- if $platform.enabled }}
        {{- include "pdserve.platformArgs" $root | nindent 8 }}
        {{- end }}
        {{- if $isInstance }}
        - --ip=$(POD_IP)
        - --num-devices={{ $own.devices }}
        - --device-type={{ $values.device.type }}
        {{- if $values.device.ipFrom }}
        - --device-ip-from={{ $values.device.ipFrom }}
        {{- end }}
        {{- else if $platform.enabled }}
        - --ip={{ $platform.apiServer | default "$(POD_IP)" }}
        {{- else }}
        # The name of the Service stays the same when the pod is recreated, so the table stays the same too.
        - --ip={{ include "pdserve.name" $root }}
        {{- end }}
        - --
        - sh
        - /opt/pdserve/deploy/PD_separate/start_servers.sh
        {{- include "pdserve.modelArgs" $root | nindent 8 }}
        {{- if $values.tls.enabled }}
        - --tls-cert=/etc/pdserve/tls/tls.crt
        - --tls-key=/etc/pdserve/tls/tls.key
        - --tls-ca=/etc/pdserve/tls/ca.crt
        {{- end }}
        {{- if $isInstance }}
        - --device={{ $values.device.type }}
        - --ip=$(POD_IP)
        - --port={{ $values.instance.port }}
        - --http-port={{ $values.instance.httpPort }}
        {{- else }}
        - --host={{ $values.scheduler.host }}
        - --port={{ $values.scheduler.port }}
        - --shutdown-timeout={{ $values.scheduler.shutdownSeconds }}
        - --startup-timeout={{ $values.instance.startupSeconds }}
        {{- end }}
        {{- range $own.args }}
        - {{ . | quote }}
        {{- end }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- if and $isInstance $values.device.annotation }}
        - name: ASCEND_VISIBLE_DEVICES
          valueFrom: {fieldRef: {fieldPath: "metadata.annotations['{{ $values.device.annotation }}']"}}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if $isInstance }}
      ports:
        - {name: grpc, containerPort: {{ $values.instance.port }}}
        - {name: metrics, containerPort: {{ $values.instance.httpPort }}}
      {{- include "pdserve.instanceProbes" $root | nindent 6 }}
      lifecycle:
        preStop:
          exec:
            command:
              - python
              - -P
              - -m
              - ranktable_tools.kube
              - drain
              - --http-port={{ $values.instance.httpPort }}
              - --settle={{ $values.instance.settleSeconds }}
              - --timeout={{ $values.instance.drainSeconds }}
      {{- include "pdserve.resources" (dict "root" $root "resources" $own.resources "devices" $own.devices) | nindent 6 }}
      {{- else }}
      ports:
        - {name: http, containerPort: {{ $values.scheduler.port }}}
      {{- include "pdserve.schedulerProbes" $root | nindent 6 }}
      {{- include "pdserve.resources" (dict "root" $root "resources" $own.resources "devices" 0) | nindent 6 }}
      {{- end }}
      securityContext:
        {{- include "pdserve.security" $root | nindent 8 }}
      volumeMounts:
        - {name: state, mountPath: /work/state}
        - {name: secret, mountPath: /etc/pdserve/secret, readOnly: true}
        {{- if $values.tls.enabled }}
        - {name: tls, mountPath: /etc/pdserve/tls, readOnly: true}
        {{- end }}
        {{- if $values.model.volume }}
        - {name: models, mountPath: {{ $values.model.mountPath }}, readOnly: true}
        {{- end }}
        {{- if $platform.enabled }}
        - {name: platform, mountPath: {{ include "pdserve.platformFolder" $root }}, readOnly: true}
        {{- end }}
        {{- if and $isInstance (ne $values.device.type "cpu") }}
        - {name: shm, mountPath: /dev/shm}
        {{- range $number, $path := $values.device.hostPaths }}
        - {name: host-{{ $number }}, mountPath: {{ $path }}, readOnly: true}
        {{- end }}
        {{- end }}
  volumes:
    - {name: state, emptyDir: {}}
    - {name: secret, secret: {secretName: {{ include "pdserve.secret" $root }}, defaultMode: 288}}
    {{- if $values.tls.enabled }}
    - name: tls
      {{- include "pdserve.tlsVolume" $root | nindent 6 }}
    {{- end }}
    {{- if not $platform.enabled }}
    {{- include "pdserve.tokenVolume" $root | nindent 4 }}
    {{- else }}
    - name: platform
      {{- if not $platform.volume }}
      {{- fail "table.platform.volume is empty: set it to the volume that contains the platform's table" }}
      {{- end }}
      {{- toYaml $platform.volume | nindent 6 }}
    {{- end }}
    {{- if $values.model.volume }}
    - name: models
      {{- toYaml $values.model.volume | nindent 6 }}
    {{- end }}
    {{- if and $isInstance (ne $values.device.type "cpu") }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $values.device.shmSize }}}}
    {{- range $number, $path := $values.device.hostPaths }}
    - {name: host-{{ $number }}, hostPath: {path: {{ $path }}}}
    {{- end }}
    {{- end }}
{{- end -}}

{{- define "pdserve.platformFolder" -}}
{{- include "pdserve.folder" .Values.table.platform.path -}}
{{- end -}}

{{- /* Takes a file's path. */ -}}
{{- define "pdserve.folder" -}}
{{- dir . -}}
{{- end -}}

{{- define "pdserve.platformArgs" -}}
- --table={{ .Values.table.platform.path }}
{{- if .Values.table.platform.dialect }}
- --dialect={{ .Values.table.platform.dialect }}
{{- end }}
{{- if .Values.table.platform.numPrefill }}
- --num-prefill={{ .Values.table.platform.numPrefill }}
{{- end }}
{{- if .Values.table.platform.devicesPerInstance }}
- --devices-per-instance={{ .Values.table.platform.devicesPerInstance }}
{{- end }}
{{- if .Values.table.platform.apiServer }}
- --api-server={{ .Values.table.platform.apiServer }}
{{- end }}
{{- end -}}

{{- /* A volume with the token, the authority and the namespace: for pods that mount no token into all containers. */ -}}
{{- define "pdserve.tokenVolume" -}}
- name: token
  projected:
    # 0440: group 1000.
    defaultMode: 288
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end -}}
