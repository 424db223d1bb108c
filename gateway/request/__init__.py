"""A request: its specification, and the mailbox of its events."""
