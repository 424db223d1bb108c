"""How many workers each pool should have, and who starts them."""
