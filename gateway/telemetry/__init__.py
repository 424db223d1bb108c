"""The metrics of ``GET /metrics``: those of every worker's engine, from heartbeats, and of this gateway.

Engine and request series have vLLM's names, so that its dashboards and autoscalers work; others are named
``spillway_…``. docs/reference/metrics.md lists all of them. Counters are plain integers without locks, updated on the
event loop about sixteen times a request. prometheus_client only renders the text.
"""
