"""The wire protocol between gateways, workers and the ledger writer, and their shared NATS client.

Imports no other package of Spillway, so that either side of the queue can be replaced independently.
"""
