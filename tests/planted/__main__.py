"""``python -m tests.planted``; imports nothing, as the processes that run tests load this module's package, too."""

import sys

if __name__ == "__main__":
    from tests.planted import command

    sys.exit(command.main())
