"""Seeds of a request's choices."""

_MASK = 2**64 - 1


def choice_seed(seed: int, choice: int) -> int:
    """The signed 64-bit seed of one choice of a request with the signed 64-bit `seed`.

    Choice 0 has the seed itself, so that it is what a request for one choice gets; the others'
    look unrelated to it, to each other and to those of other seeds.
    """
    if choice == 0:
        return seed
    mixed = _mix(_mix(seed & _MASK) + choice & _MASK)
    return mixed - 2**64 if mixed >> 63 else mixed


def _mix(x: int) -> int:
    """SplitMix64's step: a bijection of 64-bit integers."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
