"""One rule for how much a pass scores beyond the texts themselves: guesses of tiers below, and branches of its own.

Each candidate has a chance to be of use: that the text goes along its path. A pass that scores candidates of chances ``p``
gives ``own + sum(p)`` tokens in the seconds that a pass of its size takes; the best pass gives most tokens in a second. So
with load, when passes are long and each token of them costs, trees shrink to lines and lines to nothing, and grow back.
"""

from collections.abc import Callable, Sequence

DEARER = 1.15  # times their price are guesses taken to cost: those that look best are those whose price and chance flatter most


def affordable(
    candidates: Sequence[tuple[float, int]], own: float, tokens: int, most: int, cost: Callable[[int], float]
) -> int:
    """How many of the likeliest candidates pay, in a pass of at most ``most`` tokens.

    Candidates are chances, which fall, and the tokens that each reads; ``own`` is what the other ``tokens`` of the pass give,
    ``cost`` the seconds of a pass of so many tokens.
    """
    alone_s = max(cost(tokens), 1e-9)
    best, gives = 0, own
    best_rate = own / alone_s if tokens else 0.0
    for count, (chance, size) in enumerate(candidates, start=1):
        gives, tokens = gives + chance, tokens + size
        if tokens > most:
            break
        rate = gives / max(alone_s + DEARER * (cost(tokens) - alone_s), 1e-9)
        if rate >= best_rate:
            best, best_rate = count, rate
    return best
