"""The wire contract between gateways, workers and the ledger writer, and the one NATS client they share.

Imports nothing else of Spillway, so that either side of the queue can be replaced on its own.
"""
