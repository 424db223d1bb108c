"""``spillway bench``: how fast an engine, or an endpoint, answers loads of chosen sizes."""
