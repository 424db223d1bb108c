"""Payloads: what was asked and answered, kept only where the key's or the team's consent says so; docs/PAYLOADS.md.

endpoint ──Capture──> PayloadPublisher (assemble → redact → compress → seal, in a thread) ──PAYLOADS stream──>
PayloadWriter (in the ledger process) ──> table ``payloads`` ──> ``spillway payloads``, ``spillway export finetune``
"""
