"""``spillway bench``: measures the speed of an engine or an endpoint under loads of chosen sizes."""
