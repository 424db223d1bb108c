"""The C files of this folder, compiled for this CPU if a C compiler exists; otherwise torch's own kernels are used.

Compiling takes 0.1 to 3 seconds each, most of it while the weights load, so nothing is cached: the result always
matches this CPU and this source.
"""

import ctypes
import logging
import shutil
import subprocess
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

LANES: Final = 16  # floats per vector in these files: widths are multiples of it
POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64  # as the files' functions take them
COMPILING_LIMIT_S: Final = 30.0
_COMPILERS: Final = ThreadPoolExecutor(max_workers=2, thread_name_prefix="compiler")
# OpenMP's functions come from torch's own library, so that both share threads.
_OPTIONS: Final = ("-O2", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")


@cache
def compiling(source: str, *definitions: str) -> "Future[ctypes.CDLL | None]":
    """Start to compile a C file of this folder in the background; `compiled` returns the library."""
    return _COMPILERS.submit(_compile, source, definitions)


def compiled(source: str, *definitions: str) -> ctypes.CDLL | None:
    """Return the library compiled from a C file of this folder; None, with the reason logged, if that fails."""
    return compiling(source, *definitions).result()


def _compile(source: str, definitions: tuple[str, ...]) -> ctypes.CDLL | None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        log.info("no C compiler (gcc) found; running without %s, which is slower", source)
        return None
    path = Path(__file__).with_name(source)
    with tempfile.TemporaryDirectory(prefix="spillway-") as folder:
        library = Path(folder, path.with_suffix(".so").name)
        defined = [f"-D{definition}" for definition in definitions]
        command = [compiler, *defined, *_OPTIONS, str(path), "-o", str(library), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILING_LIMIT_S)  # noqa: S603
            return ctypes.CDLL(str(library))
        except (OSError, subprocess.SubprocessError) as error:
            log.warning(
                "cannot compile %s; running without, slower: %s", source, getattr(error, "stderr", None) or error
            )
            return None
