"""Limits of keys and teams: requests and tokens per minute, concurrent requests, and money per calendar period.

    a request ──reserve──> Slice (memory) <──leases── Account (key-value bucket, shared by all gateways)
                settle ──>               ──reports─>

    account.py        the shared truth and its one change (pure)   account_store.py  the bucket: compare and set
    slices.py         what this gateway holds, by memory (pure)    local.py          one account at this gateway
    leases.py         reserve, settle, report                      reservation.py    what one request holds
    seeds.py          what an account begins with that is missing  recount.py        budgets made right by the ledger
    refusals.py       which limit refuses, until when (pure)       usage.py          how much is used now, for the pages
    pools.py          caps of what a hosted pool may cost us       prices.py         what tokens cost now
    request_limits.py sizes of one request, with fields.py

docs/LIMITS.md says what is promised, docs/adr/0007 why it is made like this.
"""
