"""From token ids to text, and the forms that the text must have."""
