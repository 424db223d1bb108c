"""Pages of docs/reference that are generated from the source."""
