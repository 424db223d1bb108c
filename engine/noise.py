"""The sampler's randomness: one uniform number per (seed, choice, position).

Keyed, not drawn from a running generator: what a request gets depends on nothing but its own key, so neither
batch-mates nor the size of the batch nor a resumption on another worker can change it.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int, position: int) -> float:
    """Return a number in [0, 1) for output token `position` (from 0) of choice `index`.

    SplitMix64's finaliser chained over the three keys (Steele, Lea and Flood, OOPSLA 2014). 52 bits, so that the
    product with a total probability mass rounds to strictly less than the mass.
    """
    state = seed & _MASK
    for key in (index, position):
        state = _mix((state + _GOLDEN * (key + 1)) & _MASK)
    return (_mix((state + _GOLDEN) & _MASK) >> 12) * 2.0**-52


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
