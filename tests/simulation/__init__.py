"""A deterministic simulation of the whole request path, with the product's own parts and seeded faults.

    real        the HTTP edge from ASGI on, limits, admission control, dispatcher, outbox; the worker from its pulls to
                its frames, heartbeat and drain; the ledger writer with its SQL; ``protocol.nats.bus`` and all above it
    simulated   time (``virtual_time``), NATS with its connections and disks (``network``, ``server``, ``jetstream``),
                SQLite's threads (``sql``), the engine (``engine``), callers (``callers``)

One seed is one simulation: processes, requests, and faults with their times to the microsecond (``plan``, ``faults``).
The same seed repeats the same simulation, so a failure can be reproduced. The checks (``oracle``) are those of the
chaos suite (``tests.chaos``): every admitted request ends in a complete answer or an explicit error, in time; no token
is lost or repeated; every accepted request has exactly one row with the right counts; limits hold at all times; at the
end nothing is left in the queue, a gateway or a worker.

It cannot find bugs below ASGI or ``protocol.nats.bus`` (sockets, HTTP, nats-py), in real engines or PostgreSQL, or
where the simulated server differs from the real one. The chaos suite and ``test_server.py``, which compares both
servers, cover these.
"""
