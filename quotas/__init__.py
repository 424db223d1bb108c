"""Limits of keys and teams: requests and tokens per minute, concurrent requests, and money per calendar period.

    a request ──reserve──> Slice (memory) <──leases── Account (key-value bucket, shared by all gateways)
                settle ──>               ──reports─>

    terms.py     what a policy limits, and what a request needs      book.py    one account's books at this gateway
    account.py   the shared truth and its one change (pure)          store.py   the bucket: compare and set
    slices.py    what this gateway holds, by memory alone (pure)     quotas.py  reserve, settle, report
    recount.py   budgets made right by the ledger                    usage.py   how much is used now, for the pages
    seeds.py     what an account begins with that is not there
    refusals.py  which limit refuses, and until when (pure)          prices.py  what tokens cost now

docs/LIMITS.md says what is promised, docs/adr/0007 why it is made like this.
"""
