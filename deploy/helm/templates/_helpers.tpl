{{- /* Labels of everything here, and the selector of all pods. */ -}}
{{- define "kvconnect.all" -}}
{{- dict "app.kubernetes.io/name" "kvconnect" "app.kubernetes.io/instance" .Release.Name | toJson }}
{{- end }}
{{- /* Labels and selector of a component: (list $ "router"). */ -}}
{{- define "kvconnect.labels" -}}
{{- dict
  "app.kubernetes.io/name" "kvconnect"
  "app.kubernetes.io/instance" (first .).Release.Name
  "app.kubernetes.io/component" (last .) | toJson }}
{{- end }}
{{- /* The HTTP port of "prefill" or "decode" servers. */ -}}
{{- define "kvconnect.port" -}}
{{ ternary 8100 8200 (eq . "prefill") }}
{{- end }}
