"""A deterministic simulation of the whole path, with the product's own parts and faults by the seed.

    real        the HTTP edge from ASGI on, limits, admission control, dispatcher, outbox; the worker from its pulls to
                its frames, heartbeat and drain; the ledger writer with its SQL; ``protocol.nats.bus`` and all above it
    simulated   time (``virtual_time``), NATS with its connections and disks (``network``, ``server``, ``jetstream``),
                SQLite's threads (``sql``), the engine (``engine``), callers (``callers``)

One seed is one simulation: who is there, what is asked, what goes wrong and when, to the microsecond (``plan``,
``faults``). The same seed does the same again, so whatever it finds can be looked at as often as one likes. What is
judged (``oracle``) is what the chaos suite judges (``tests.chaos``): every admitted request ends in a complete answer
or an explicit error, in time; no token is lost or repeated; every accepted one has exactly one row, with the right
counts; limits hold at every moment; in the end nothing is left in the queue, in a gateway or in a worker.

What it cannot find: what lies below ASGI or ``protocol.nats.bus`` (sockets, HTTP, nats-py), in real engines, in
PostgreSQL, and wherever the simulated server differs from the real one. For these there are the chaos suite and
``test_server.py``, which asks both servers the same.
"""
