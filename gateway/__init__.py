"""The HTTP edge: authenticates, counts, admits, publishes jobs, routes tokens back, and leaves a record of each."""
