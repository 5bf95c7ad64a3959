{{- /* What every object carries. */ -}}
{{- define "anneal.labels" -}}
app.kubernetes.io/part-of: anneal
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* By what Services, policies and budgets select a program's pods: (dict "name" … ). */ -}}
{{- define "anneal.selector" -}}
app.kubernetes.io/name: {{ .name }}
{{- end -}}

{{- /* One label for each kind of thing that the pods may call. */ -}}
{{- define "anneal.reaches" -}}
{{- $labels := dict -}}
{{- range . }}{{ $_ := set $labels (printf "anneal/reaches-%s" .) "true" }}{{ end -}}
{{- toYaml $labels -}}
{{- end -}}

{{- /* A pod without root, token or Service variables: (dict "root" $ "user" 10001). The pause container reaps
processes, as compose's `init` does. */ -}}
{{- define "anneal.pod" -}}
serviceAccountName: {{ .account | default "anneal" }}
automountServiceAccountToken: false
enableServiceLinks: false
shareProcessNamespace: true
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user }}
  runAsGroup: {{ .user }}
  fsGroup: {{ .user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
  {{- with .sysctls }}
  sysctls: {{ toJson . }}
  {{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "anneal.container-security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* The words of a command as a list; '' is an empty word. */ -}}
{{- define "anneal.command" -}}
{{- $words := list -}}
{{- range regexSplit "\\s+" (trim .) -1 }}{{ $words = append $words (trimAll "'" .) }}{{ end -}}
{{ toJson $words }}
{{- end -}}

{{- /* A variable from a Secret: (dict "variable" … "secret" … "key" … ). `?` at the variable's end: it may be missing. */ -}}
{{- define "anneal.secret-variable" -}}
{{- $name := trimSuffix "?" .variable -}}
- name: {{ $name }}
  valueFrom:
    secretKeyRef: {name: {{ .secret }}, key: {{ .key | default $name }}{{ if hasSuffix "?" .variable }}, optional: true{{ end }}}
{{- end -}}

{{- /* Where the worker API is for pods, also for nodes in other namespaces. */ -}}
{{- define "anneal.internal-url" -}}
http://internal.{{ .Release.Namespace }}.svc:8001
{{- end -}}

{{- /* The addresses of all replicas, and those of the settings, which need no operator's approval. */ -}}
{{- define "anneal.replica-addresses" -}}
{{- $hosts := list -}}
{{- range $group := .Values.replicas -}}
{{- range until (int $group.replicas) -}}
{{- $hosts = append $hosts (printf "replica-%s-%d.replica-%s.%s.svc" $group.name . $group.name $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{ join "," (compact (append $hosts (index .Values.settings "ANNEAL_REPLICA_ADDRESSES"))) }}
{{- end -}}

{{- /* The variables of a program of the control plane: (dict "root" $ "program" …). */ -}}
{{- define "anneal.control-variables" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $fixed := dict
  "ANNEAL_PUBLIC_URL" (required "publicUrl: the public origin, such as https://anneal.example.com" $values.publicUrl)
  "ANNEAL_OBJECT_STORE" (required "objectStore: s3://bucket?endpoint=…&region=…" $values.objectStore)
  "ANNEAL_INTERNAL_URL" ($values.internalUrl | default (include "anneal.internal-url" $root))
  "ANNEAL_GATEWAY_URL" "http://gateway:8002"
  "ANNEAL_WORKER_GATEWAY_URL" (printf "http://gateway.%s.svc:8002" $root.Release.Namespace)
  "ANNEAL_REPLICA_ADDRESSES" (include "anneal.replica-addresses" $root)
  "ANNEAL_BASE_MODEL_ROOTS" "/var/lib/anneal/models"
  "ANNEAL_DEBUG" "0"
  "CELERY_SKIP_CHECKS" "1"
  "FORWARDED_ALLOW_IPS" "*"
  "OMP_NUM_THREADS" "1"
  "TOKENIZERS_PARALLELISM" "false"
  "DJANGO_SETTINGS_MODULE" (.program.settingsModule | default "apps.config.settings.prod")
-}}
{{- range $name, $value := mergeOverwrite $fixed (omit $values.settings "ANNEAL_REPLICA_ADDRESSES") }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- range $name := list "ANNEAL_SECRET_KEY" "ANNEAL_KEY_PEPPER" "ANNEAL_SIGNING_KEY" "ANNEAL_SECRET_KEY_FALLBACKS?" }}
{{ include "anneal.secret-variable" (dict "variable" $name "secret" $values.secrets.keys) }}
{{- end }}
{{ include "anneal.secret-variable" (dict "variable" "DATABASE_URL" "secret" $values.secrets.database "key" (printf "DATABASE_%s_URL" (upper .program.role))) }}
{{- range $name := list "REDIS_URL" "CELERY_BROKER_URL" }}
{{ include "anneal.secret-variable" (dict "variable" $name "secret" $values.secrets.redis "key" "REDIS_URL") }}
{{- end }}
{{- with $values.secrets.traces }}
{{ include "anneal.secret-variable" (dict "variable" "OTEL_EXPORTER_OTLP_HEADERS" "secret" .) }}
{{- end }}
{{- range $key, $names := .program.secrets }}
{{- if index $values.secrets $key }}
{{- range $names }}
{{ include "anneal.secret-variable" (dict "variable" . "secret" (index $values.secrets $key)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Folders of a program of the control plane: uploads on their way, base models, the brand's files. */ -}}
{{- define "anneal.control-mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.modelsClaim }}
- {name: models, mountPath: /var/lib/anneal/models, readOnly: true}
{{- end }}
{{- if .Values.brandConfigMap }}
- {name: brand, mountPath: /var/lib/anneal/brand, readOnly: true}
{{- end }}
{{- end -}}

{{- define "anneal.control-volumes" -}}
- {name: tmp, emptyDir: {}}
{{- with .Values.modelsClaim }}
- {name: models, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
{{- end }}
{{- with .Values.brandConfigMap }}
- {name: brand, configMap: {name: {{ . }}}}
{{- end }}
{{- end -}}

{{- /* Whether a program has work: (dict "root" $ "program" …); "" if not. */ -}}
{{- define "anneal.has-work" -}}
{{- if .program.onlyWith }}{{ if eq (toString (index .root.Values.settings .program.onlyWith)) "1" }}yes{{ end }}
{{- else if .program.onlyWithSecret }}{{ if index .root.Values.secrets .program.onlyWithSecret }}yes{{ end }}
{{- else }}yes{{ end }}
{{- end -}}
