"""Makes the demo model: its text, its training and its evaluation."""
