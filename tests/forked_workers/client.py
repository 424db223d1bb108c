"""What pytest-xdist starts instead of Python: hands its pipes and its code over to a forked process, and waits for it.

It runs without site-packages, in 10 ms. Arguments: the server's socket, and those that pytest-xdist gives to Python
(``-u -c CODE``).
"""

import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    socket.send_fds(server, [sys.argv[-1].encode()], [0, 1, 2])
    for pipe in (0, 1):  # the forked process has them now, and its end must be theirs
        os.close(pipe)
    server.recv(1)  # nothing is sent: this returns when the forked process has ended
