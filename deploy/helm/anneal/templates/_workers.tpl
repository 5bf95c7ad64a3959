{{- /* What trainers and replicas have in common: no secret of the control plane, no database, one way out. */ -}}

{{- /* The head of a StatefulSet: (dict "root" $ "name" … "group" … "reaches" …). Each pod keeps its folder, because the
credential in it was bought with a one-time token. */ -}}
{{- define "anneal.worker-set" -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ .name }}
  labels:
    {{- include "anneal.labels" .root | nindent 4 }}
    {{- include "anneal.selector" (dict "name" .name) | nindent 4 }}
spec:
  {{- if not .group.scaling }}
  replicas: {{ .group.replicas }}
  {{- end }}
  serviceName: {{ .name }}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "anneal.selector" (dict "name" .name) | nindent 6 }}
  volumeClaimTemplates:
    {{- range $volume, $size := dict "work" .group.work "hub" .root.Values.gpu.hub }}
    - metadata: {name: {{ $volume }}}
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $.root.Values.gpu.storageClass }}
        storageClassName: {{ . }}
        {{- end }}
        resources: {requests: {storage: {{ $size }}}}
    {{- end }}
  template:
    metadata:
      labels:
        {{- include "anneal.labels" .root | nindent 8 }}
        {{- include "anneal.selector" (dict "name" .name) | nindent 8 }}
        anneal/kind: {{ .kind }}
        {{- include "anneal.reaches" .reaches | nindent 8 }}
    spec:
      {{- include "anneal.pod" (dict "root" .root "user" 10001) | nindent 6 }}
      {{- with .root.Values.gpu.runtimeClass }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- with .group.nodeSelector | default .root.Values.gpu.nodeSelector }}
      nodeSelector: {{ toJson . }}
      {{- end }}
      tolerations: [{key: {{ .root.Values.gpu.resource }}, operator: Exists, effect: NoSchedule}]
{{- end -}}

{{- define "anneal.worker-service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}
  labels:
    {{- include "anneal.labels" .root | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true  # a replica reports itself when it is ready
  selector:
    {{- include "anneal.selector" (dict "name" .name) | nindent 4 }}
  {{- with .port }}
  ports:
    - {name: http, port: {{ . }}, targetPort: http}
  {{- end }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels:
    {{- include "anneal.labels" .root | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "anneal.selector" (dict "name" .name) | nindent 6 }}
{{- end -}}

{{- define "anneal.worker-volumes" -}}
- {name: home, emptyDir: {}}  # caches of compiled kernels
- {name: tmp, emptyDir: {}}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .root.Values.gpu.sharedMemory }}}}
- name: token
  secret: {secretName: {{ .group.secret }}, defaultMode: 0440, optional: true}  # used up when all have enrolled
{{- with .root.Values.modelsClaim }}
- {name: models, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
{{- end }}
{{- end -}}

{{- /* Folders of one container: (dict "root" $ "work" "trainer" "hub" true "shared" true "token" true). */ -}}
{{- define "anneal.worker-mounts" -}}
- {name: home, mountPath: /var/lib/anneal}
- {name: tmp, mountPath: /tmp}
- {name: work, mountPath: /var/lib/anneal/{{ .work }}}
{{- if .hub }}
- {name: hub, mountPath: /var/lib/anneal/huggingface{{ if eq (toString .hub) "read" }}, readOnly: true{{ end }}}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if .token }}
- {name: token, mountPath: /run/secrets/anneal, readOnly: true}
{{- end }}
{{- if .root.Values.modelsClaim }}
- {name: models, mountPath: /var/lib/anneal/models, readOnly: true}
{{- end }}
{{- end -}}

{{- /* Plain variables, sorted by name. */ -}}
{{- define "anneal.variables" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "anneal.pod-name" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end -}}

{{- define "anneal.gpu-resources" -}}
{{- $card := dict .root.Values.gpu.resource (toString .group.gpus) -}}
{{- $given := deepCopy .group.resources -}}
{{- if .group.gpus }}{{ $given = merge $given (dict "limits" $card "requests" $card) }}{{ end -}}
{{ toYaml $given }}
{{- end -}}
