"""The wire protocol between gateways, workers and the ledger writer, and their shared NATS client.

Imports no other package of Spillway, so that either side of the queue can be replaced independently.
"""

import sys

if sys.version_info < (3, 13):
    from protocol.timeouts import mend_task_groups, mend_timeouts

    mend_task_groups()
    if sys.version_info < (3, 11, 3):
        mend_timeouts()
