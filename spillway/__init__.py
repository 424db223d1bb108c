"""The command line and the all-in-one launcher."""
