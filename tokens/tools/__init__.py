"""How models write calls of tools and their reasoning: reading it out of answers, and forcing it by a grammar."""
