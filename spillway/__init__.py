"""The command line and the all-in-one launcher.

The other packages are top-level. In a checkout they lie beside this folder. In a wheel they lie inside it, so that
their names cannot clash with other distributions. Importing this package puts them first on sys.path.
"""

import sys
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).resolve().parent
IS_WHEEL: Final = (_HERE / "_roots").is_dir()
ROOMS: Final = _HERE / "_roots" if IS_WHEEL else _HERE.parent  # the demo model lies beside them

sys.path.insert(0, str(ROOMS))
