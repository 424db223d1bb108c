"""A process whose clock is wrong by CLOCK_AHEAD_S: Python runs this first where the folder is in PYTHONPATH."""

import os
import time

AHEAD_S = float(os.environ["CLOCK_AHEAD_S"])
_right, _right_ns = time.time, time.time_ns
time.time = lambda: _right() + AHEAD_S
time.time_ns = lambda: _right_ns() + int(AHEAD_S * 1e9)
