{{- define "spillway.fullname" -}}
{{- ternary .Release.Name (printf "%s-spillway" .Release.Name) (contains "spillway" .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- /* Selector labels of a part's pods. Arguments: root, component, and a pool's name if it is a pool. */}}
{{- define "spillway.selector" -}}
app.kubernetes.io/name: spillway
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
spillway-pool: {{ index . 2 }}
{{- end }}
{{- end }}

{{- /* All pods of this release. */}}
{{- define "spillway.everything" -}}
app.kubernetes.io/name: spillway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Arguments: root, name, component. */}}
{{- define "spillway.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "spillway.selector" (list $root (index . 2)) | nindent 2 }}
  app.kubernetes.io/part-of: spillway
  app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $root.Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{- /* The parsed configuration as JSON. Rendering fails if it does not match the other values. */}}
{{- define "spillway.config" -}}
{{- $config := fromToml .Values.config -}}
{{- if $config.Error }}{{ fail (printf "config: %s" $config.Error) }}{{ end -}}
{{- if not $config.models }}{{ fail "config: has no [models]" }}{{ end }}
{{- range $name, $pool := $.Values.pools }}
{{- $section := dig "pools" $name dict $config }}
{{- if not $section }}{{ fail (printf "pools.%s: config has no section [pools.%s]" $name $name) }}{{ end }}
{{- if eq $pool.kind "vllm" }}
{{- if ne (dig "engine" "kind" "" $section) "vllm" }}{{ fail (printf "config: pools.%s.engine.kind must be vllm, because pools.%s.kind is vllm" $name $name) }}{{ end }}
{{- if not (regexMatch "^http://127\\.0\\.0\\.1:[0-9]+/?$" (dig "engine" "url" "" $section)) }}{{ fail (printf "config: pools.%s.engine.url must be http://127.0.0.1:PORT, because vLLM runs in the worker's pod" $name) }}{{ end }}
{{- end }}
{{- if include "spillway.scaledByController" (list $ $name $section) }}
{{- if $pool.keda }}{{ fail (printf "pools.%s.keda: not allowed, because pools.%s.fleet of config makes the controller scale this pool" $name $name) }}{{ end }}
{{- $workers := include "spillway.workers" (list $ $name) }}
{{- if ne (dig "fleet" "driver" "deployment" "" $section) $workers }}{{ fail (printf "config: pools.%s.fleet.driver.deployment must be %s" $name $workers) }}{{ end }}
{{- if ne (dig "fleet" "driver" "namespace" "spillway" $section) $.Release.Namespace }}{{ fail (printf "config: pools.%s.fleet.driver.namespace must be %s" $name $.Release.Namespace) }}{{ end }}
{{- end }}
{{- end }}
{{- toJson $config -}}
{{- end }}

{{- define "spillway.checksum" -}}
checksum/config: {{ sha256sum .Values.config }}
{{- end }}

{{- /* Arguments: root, name, suffix of the tag. */}}
{{- define "spillway.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ index . 1 }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}{{ index . 2 }}
{{- end }}

{{- /* Fields common to all pods. Arguments: root, values with nodeSelector, tolerations and affinity. */}}
{{- define "spillway.pod" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
enableServiceLinks: false
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - { name: {{ . }} }
  {{- end }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "spillway.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "spillway.containerSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}

{{- /* Variables of a container. Arguments: root, keys of the Secret, additional variables. */}}
{{- define "spillway.env" -}}
{{- $root := index . 0 -}}
{{- $keys := index . 1 -}}
{{- $secret := $root.Values.secret -}}
{{- $variables := dict "natsUrls" "SPILLWAY_NATS__URLS" "fleetNatsUrls" "SPILLWAY_NATS__URLS" "databaseUrl" "SPILLWAY_DATABASE__URL" "keyPepper" "SPILLWAY_AUTH__PEPPER" -}}
env:
  - { name: SPILLWAY_DATA_DIR, value: /var/lib/spillway }
  {{- range $keys }}
  - name: {{ get $variables . }}
    valueFrom: { secretKeyRef: { name: {{ $secret.name }}, key: {{ get $secret.keys . | default $secret.keys.natsUrls }} } }
  {{- end }}
  {{- if or (has "natsUrls" $keys) (has "fleetNatsUrls" $keys) }}
  {{- if $root.Values.nats.credentialsSecret }}
  - { name: SPILLWAY_NATS__CREDENTIALS, value: /etc/spillway-credentials }
  {{- end }}
  {{- if $root.Values.nats.caSecret }}
  - { name: SPILLWAY_NATS__CA_FILE, value: /etc/spillway-ca/ca.crt }
  {{- end }}
  {{- end }}
  {{- with index . 2 }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "spillway.mounts" -}}
- { name: config, mountPath: /etc/spillway, readOnly: true }
- { name: tmp, mountPath: /tmp }
- { name: data, mountPath: /var/lib/spillway }
{{- if .Values.nats.credentialsSecret }}
- { name: credentials, mountPath: /etc/spillway-credentials, readOnly: true }
{{- end }}
{{- if .Values.nats.caSecret }}
- { name: ca, mountPath: /etc/spillway-ca, readOnly: true }
{{- end }}
{{- end }}

{{- /* Arguments: root, names of credentials files, sizes of /tmp and of the data folder (empty: it is a claim). */}}
{{- define "spillway.volumes" -}}
{{- $root := index . 0 -}}
{{- $nats := $root.Values.nats -}}
- { name: config, configMap: { name: {{ include "spillway.fullname" $root }} } }
- { name: tmp, emptyDir: { sizeLimit: {{ index . 2 }} } }
{{- with index . 3 }}
- { name: data, emptyDir: { sizeLimit: {{ . }} } }
{{- end }}
{{- if $nats.credentialsSecret }}
- name: credentials
  secret:
    secretName: {{ $nats.credentialsSecret }}
    items:
      {{- range index . 1 }}
      - { key: {{ . }}, path: {{ . }} }
      {{- end }}
{{- end }}
{{- if $nats.caSecret }}
- { name: ca, secret: { secretName: {{ $nats.caSecret }}, items: [{ key: ca.crt, path: ca.crt }] } }
{{- end }}
{{- end }}

{{- /* Name of a pool's Deployment. Arguments: root, pool. */}}
{{- define "spillway.workers" -}}
{{ include "spillway.fullname" (index . 0) }}-worker-{{ index . 1 }}
{{- end }}

{{- /* "true" if a controller scales a pool of this release. Arguments: root, pool, [pools.X]. */}}
{{- define "spillway.scaledByController" -}}
{{- $driver := dig "fleet" "driver" dict (index . 2) -}}
{{- if eq ($driver.kind | default "") "kubernetes" }}true{{ end -}}
{{- end }}

{{- /* A name escaped as in the queue's consumer names: `escape` in protocol/subjects.py. */}}
{{- define "spillway.escape" -}}
{{- range regexFindAll "." . -1 }}{{ if regexMatch "^[A-Za-z0-9_-]$" . }}{{ . }}{{ else }}{{ regexReplaceAll "(..)" (printf "%X" .) "=$1" }}{{ end }}{{ end -}}
{{- end }}

{{- /* Peers of a policy, empty without arguments. Arguments: names of namespaces, CIDRs. */}}
{{- define "spillway.peers" -}}
{{- range index . 0 }}
- { namespaceSelector: { matchLabels: { kubernetes.io/metadata.name: {{ . }} } } }
{{- end }}
{{- range index . 1 }}
- { ipBlock: { cidr: {{ . | quote }} } }
{{- end }}
{{- end }}

{{- define "spillway.ports" -}}
[{{ range $i, $port := . }}{{ if $i }}, {{ end }}{ port: {{ $port }} }{{ end }}]
{{- end }}
