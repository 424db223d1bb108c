"""``Idempotency-Key``: the same request again finds the running one, or its answer, instead of running twice.

    request with a key ──> find here ──────────────────> read its recording          attached, replayed
                             │ not here
                             v
                           claim it in the bucket ─────> run it, into a recording     the first
                             │ another gateway's claim
                             v
                           read that one's recording ──> (it is gone, or has forgotten: take the claim over)

- ``recording``: one answer as it was sent, for any number of readers
- ``runs``: the runs of this gateway, running and ended, and how long they are kept
- ``claims``: which gateway has a key
- ``sharing``: reading from another gateway, and being read from

The recording holds the answer's bytes, so whoever reads it gets the same ids, times and events, and everything that
makes an answer knows nothing of keys. A request without a key touches none of this.
"""
