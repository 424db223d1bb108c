"""Decides how many workers each pool should have, and starts and ends the machines that they run on."""
