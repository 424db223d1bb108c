"""A model's own sampling parameters: what its ``generation_config.json`` says, as vLLM reads it."""

from collections.abc import Mapping
from typing import Any, Final

GENERATION_CONFIG: Final = "generation_config.json"
# Each parameter with its least and largest value, as requests may have them (``gateway.api.schema``).
_BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**32 - 1),  # 0 and -1: off
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 100),
}
SAMPLING_DEFAULTS: Final = frozenset(_BOUNDS)


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters of a generation config, less those out of range.

    Other parameters of the file are not read. ``do_sample`` is not either: vLLM samples whatever it says.
    """
    found = {}
    for name, (least, most) in _BOUNDS.items():
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            found[name] = value
    if "top_k" in found:
        top_k = int(found.pop("top_k"))
        found |= {"top_k": top_k} if top_k > 0 else {}
    return found
