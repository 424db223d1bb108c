"""Who may wait, in which lane, and for how long: decided from memory, in a few microseconds a request.

heartbeats ──> capacity ──┐
stream info ─> backlog ───┼──> control ──> refusal, or a ticket with its lane and place
tenants ─────> shards ────┤
gateways ────> elsewhere ─┘
"""
