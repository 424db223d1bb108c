"""How the demo model is made: its text, its training and its evaluation."""
