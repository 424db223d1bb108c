"""Keys and teams: making them, what they may do, who changed them, and on every request whose key it is."""
