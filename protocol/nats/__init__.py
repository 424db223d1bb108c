"""The NATS client: streams, the outbox, leases, large objects, and permissions."""
