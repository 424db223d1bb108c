"""A pytest plugin: the worker processes of pytest-xdist are forked from one that has imported all tests.

pytest-xdist starts each of its processes anew. Each imports torch, transformers and 900 files of tests, which takes 7
to 13 s of processor time before the first test. Here one process imports them once (server.py). pytest-xdist starts its
workers by a small program (client.py) that asks this process to fork, and gives it the pipes to pytest-xdist.

Processes that tests start by ``tests.forks`` are forked from it, too.

The workers collect as always. What could not be imported, they import again and report. Linux only: there a forked
process ends with its server.
"""
