"""The restore of a lost home region, as the runbook says: ``make drill``."""
