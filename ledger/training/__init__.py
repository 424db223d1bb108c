"""Training sets from payloads whose owners consented to it (docs/how-to/payloads.md).

rows ──(consent, filters)──> conversations ──(rules of the format)──> scratch file ──(the longest of each, no
duplicates)──> train, validation and test, in one order for the same rows
"""
