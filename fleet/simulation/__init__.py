"""Plays days of traffic and spot losses against the fleet's policy, and against others, in seconds."""
