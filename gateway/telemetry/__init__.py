"""The exposition of ``GET /metrics``: every worker's engine, by its heartbeats, and this gateway.

Engine and request series bear vLLM's names, so that boards and autoscalers made for it work; what a gateway alone knows
is called ``spillway_…``. docs/reference/metrics.md lists them all. Counting is our own, a few integers and no locks:
all of it happens on the event loop, sixteen times a request. The text is prometheus_client's.
"""
