"""The C files of this folder, compiled for this CPU where there is a C compiler; torch's own kernels do elsewhere.

Compiling takes under a second each, most of it beside the loading of the weights, so nothing is kept: the result fits
this very CPU and this very source.
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

LANES: Final = 16  # floats of a vector in these files: widths are multiples of it
POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64  # as the files' functions take them
COMPILING_LIMIT_S: Final = 30.0
_COMPILERS: Final = ThreadPoolExecutor(max_workers=2, thread_name_prefix="compiler")
# OpenMP's functions are found in torch's own library, so that both use the same threads.
_OPTIONS: Final = ("-O2", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")


@cache
def compiling(source: str, *definitions: str) -> "Future[ctypes.CDLL | None]":
    """Begin to make the library of a C file of this folder, beside whatever takes its time; see `compiled`."""
    return _COMPILERS.submit(_compile, source, definitions)


def compiled(source: str, *definitions: str) -> ctypes.CDLL | None:
    """Return the library made of a C file of this folder, or None, and the log says why, where that cannot be done."""
    return compiling(source, *definitions).result()


def _compile(source: str, definitions: tuple[str, ...]) -> ctypes.CDLL | None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        log.info("no C compiler (gcc) is installed; without %s the engine will be slower", source)
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
            log.warning("without %s the engine will be slower: %s", source, getattr(error, "stderr", None) or error)
            return None
