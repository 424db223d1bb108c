"""The scaling policy: pure functions, shared by the controller and the simulator."""
