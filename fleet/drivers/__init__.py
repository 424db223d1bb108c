"""Ways to get a machine: one file for each kind of provider, and the registry."""
