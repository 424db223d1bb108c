"""A request: its specification, its states, its failure, and the mailbox of its events."""
