"""One rule for how much a pass scores beyond the texts themselves: guesses of tiers below, and branches of its own.

Each candidate has a chance to be of use: that the text goes along its path. A pass that scores candidates of chances ``p``
gives ``own + sum(p)`` tokens in ``cost(tokens + k)`` seconds; the best pass is the one that gives most tokens in a second. So
with load, when passes are long and each token of them costs, trees shrink to lines and lines to nothing, and grow back.
"""

from collections.abc import Callable, Sequence


def affordable(chances: Sequence[float], own: float, tokens: int, cost: Callable[[int], float]) -> int:
    """How many of the likeliest candidates pay; ``chances`` fall, ``own`` is what the other ``tokens`` of the pass give."""
    best, gives = 0, own
    best_rate = own / max(cost(tokens), 1e-9) if tokens else 0.0
    for count, chance in enumerate(chances, start=1):
        gives += chance
        rate = gives / max(cost(tokens + count), 1e-9)
        if rate >= best_rate:
            best, best_rate = count, rate
    return best
