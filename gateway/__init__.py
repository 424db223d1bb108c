"""The HTTP edge: authenticates, counts and admits requests, publishes jobs, streams tokens back, records usage."""
