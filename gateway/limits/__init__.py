"""Limits of keys and teams: requests and tokens per minute, concurrent requests, and money per calendar period.

    a request ──reserve──> Slice (memory) <──leases── Account (key-value bucket, shared by all gateways)
                settle ──>               ──reports─>

    account.py      the shared account, the one (pure) way to change it, and its bucket
    local.py        one account at this gateway: its slice, and which limit refuses until when
    leases.py       reserve, settle, report                 reservation.py  the amounts that one request holds
    seeds.py        initial amounts of a missing account
    report.py       current use, for the pages; budgets recounted from the ledger
    prices.py       current token prices; spending caps of hosted pools
    sizes.py        size limits of one request

Guarantees: docs/reference/limits.md. Design: docs/adr/0007.
"""
