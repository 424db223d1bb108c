"""Wire formats of servers and hosted APIs that take messages."""
