"""How many workers each pool should have: pure functions, the same in the controller and in the simulator."""
