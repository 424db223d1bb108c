"""``Idempotency-Key``: a repeated request finds the running one or its answer instead of running twice.

    request with a key ──> find here ──────────────────> read its recording          attached, replayed
                             │ not here
                             v
                           claim it in the bucket ─────> run it, into a recording     the first
                             │ another gateway's claim
                             v
                           read that one's recording ──> (the gateway is gone or has no run: take over the claim)

- ``recording``: an answer as it was sent, for any number of readers
- ``runs``: the running and ended runs of this gateway
- ``claims``: which gateway owns a key
- ``sharing``: reading answers from other gateways, and serving them

The recording holds the bytes of the answer, so every reader gets the same ids, times, and events. The code that
generates answers does not know about keys. Requests without a key bypass this package.
"""
