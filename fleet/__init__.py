"""The fleet controller: decides how many workers each pool has, and starts and ends their machines."""
