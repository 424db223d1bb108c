"""``python -m tests.simulation``; see the package's docstring."""

import os
import sys

HASH_SEED = "0"  # the iteration order of sets of strings depends on it


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], environment)
    from tests.simulation import command

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
