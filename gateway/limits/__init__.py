"""Limits of keys and teams: requests and tokens per minute, concurrent requests, and money per calendar period.

    a request ──reserve──> Slice (memory) <──leases── Account (key-value bucket, shared by all gateways)
                settle ──>               ──reports─>

    account.py      the shared truth, its one change (pure), and the bucket that it is in
    local.py        one account at this gateway: its slice, and which limit refuses until when
    leases.py       reserve, settle, report                 reservation.py  what one request holds
    seeds.py        what an account begins with that is missing
    report.py       how much is used now, for the pages; budgets made right by the ledger
    prices.py       what tokens cost now; caps of what a hosted pool may cost us
    sizes.py        how large one request may be

docs/reference/limits.md says what is promised, docs/adr/0007 why it is made like this.
"""
