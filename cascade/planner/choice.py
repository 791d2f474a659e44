"""How many guesses a pass scores, how many a head makes, and when a pass waits for one. Pure.

Each candidate of a pass (a guess after a text, or a step of a branch) has a chance to be of use: that the text goes along its
path. A pass that scores candidates of chances ``p`` gives ``own + sum(p)`` tokens in the seconds that a pass of its size takes;
the best pass gives most tokens in a second. So with load, when passes are long and each token of them costs, trees shrink to
lines and lines to nothing, and grow back.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cascade.planner.acceptance import DraftStats

DEARER = 1.15  # times their price are guesses taken to cost: those that look best are those whose price and chance flatter most
MOST_STEPS = 6  # guesses that a head makes one after the other


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


def paying_steps(right: float, cost: float, most: int = MOST_STEPS) -> int:
    """Steps of a head that give most tokens a second, 0 to ``most``.

    ``right`` is the chance of each guess to be right if those before it are, ``cost`` what a step takes as a share of a pass
    (Leviathan et al., arXiv 2211.17192, section 3.3).
    """
    tokens = itertools.accumulate(right**place for place in range(most + 1))
    rates = [gives / (1 + cost * number) for number, gives in enumerate(tokens)]
    return rates.index(max(rates)) if cost else most


@dataclass(frozen=True, slots=True)
class Policy:
    """What a tier's configuration says about guesses, and when a pass waits for them.

    A pass goes on with whatever guesses are there; only after a correction it may wait for a few. Waiting for ``m`` guesses
    costs ``m / guesses`` passes, where ``guesses`` come while a pass runs. It is a renewal problem with two states: after a
    correction, and with guesses at hand. From the first a pass gives ``1 + P(1) + ... + P(m)`` tokens, ``P(i)`` being the
    chance that the first ``i`` guesses are right, and leads to the second with chance ``P(m + 1)``. `waits_for` takes the ``m``
    with most tokens per pass in the long run.
    """

    patience: float = 1.0  # longest wait for guesses, as a share of one pass of this tier
    max_guesses: int = 16  # guesses scored in one pass at most

    def waits_for(self, stats: DraftStats, room: int) -> int:
        """Guesses that a pass after a correction waits for, where ``room`` can be used; 0: it starts at once."""
        most = int(min(room, self.max_guesses, self.patience * stats.guesses))
        share = min(stats.right / (stats.right + stats.wrong), 0.999)
        at_hand = min(stats.guesses, self.max_guesses) + 1
        tokens_at_hand, stays = (1 - share**at_hand) / (1 - share), share**at_hand
        best, best_rate, tokens = 0, 0.0, 1.0
        for number in range(most + 1):
            tokens += stats.chance(number) if number else 0.0
            visits = stats.chance(number + 1) / (1 - stays)  # passes with guesses at hand until the next correction
            rate = (tokens + visits * tokens_at_hand) / (1 + number / stats.guesses + visits)
            if rate > best_rate:
                best, best_rate = number, rate
        return best
