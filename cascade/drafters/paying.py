"""How many guesses pay that take time, one after the other: what the next one adds to a pass, against what it takes."""

MOST = 6  # guesses of a pass


def speed(right: float, cost: float, most: int = MOST) -> float:
    """Over a pass without guesses, with as many as pay best; see `paying`."""
    return max(_speed(right, cost, number) for number in range(1, most + 1))


def paying(right: float, cost: float, most: int = MOST) -> int:
    """Guesses that give most tokens a second, 0 to ``most``.

    ``right`` is the chance of each to be right if those before it are, ``cost`` what one takes as a share of a pass
    (Leviathan et al., arXiv 2211.17192, section 3.3).
    """
    if not cost:
        return most
    best = max(range(1, most + 1), key=lambda number: _speed(right, cost, number))
    return best if _speed(right, cost, best) > 1 else 0


def _speed(right: float, cost: float, number: int) -> float:
    return sum(right**place for place in range(number + 1)) / (1 + cost * number)
