"""The command line and the all-in-one launcher.

The other rooms are top-level packages: in a checkout beside this folder, in a wheel inside it, where their names cannot
clash with anybody's. Importing this package lets this process find them, before any others that are called the same.
"""

import sys
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).resolve().parent
IS_WHEEL: Final = (_HERE / "_roots").is_dir()
ROOMS: Final = _HERE / "_roots" if IS_WHEEL else _HERE.parent  # the demo model lies beside them

sys.path.insert(0, str(ROOMS))
