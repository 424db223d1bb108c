"""The NATS client: subjects and streams, the outbox, leases, large objects, and who may do what."""
