"""SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) on Python's integers.

`cascade.engine.sampling.own_tokens` has the same for tensors, `cascade.cpu.noise` for kernels.
"""

GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix(z: int) -> int:
    """The finaliser: 64 bits that look random, of the low 64 bits of ``z``."""
    z &= _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def signed(z: int) -> int:
    """The same 64 bits as an int64."""
    return z - 2**64 if z >= 2**63 else z
