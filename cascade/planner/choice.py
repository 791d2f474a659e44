"""How many guesses a pass scores, and when a pass waits for one. Pure.

Each candidate of a pass (a guess, or a step of a branch) has a chance: that the text takes its path. A pass that scores
candidates of chances ``p`` gives ``own + sum(p)`` tokens in the seconds that a pass of its size takes. The best pass gives the
most tokens per second. So under load, when each further token of a pass costs time, trees shrink to lines and lines to nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cascade.planner.acceptance import DraftStats
from cascade.planner.tuning import GUESS_PRICE


def affordable(
    candidates: Sequence[tuple[float, int]], own: float, tokens: int, most: int, cost: Callable[[int], float]
) -> int:
    """How many of the likeliest candidates pay, in a pass of at most ``most`` tokens.

    ``candidates`` are pairs of chance, decreasing, and tokens to read. Without them the pass reads ``tokens`` tokens and gives
    ``own`` tokens of text. ``cost`` maps a number of tokens to the seconds of a pass.
    """
    alone_s = max(cost(tokens), 1e-9)
    best, gives = 0, own
    best_rate = own / alone_s if tokens else 0.0
    for count, (chance, size) in enumerate(candidates, start=1):
        gives += chance
        tokens += size
        if tokens > most:
            break
        rate = gives / max(alone_s + GUESS_PRICE * (cost(tokens) - alone_s), 1e-9)
        if rate >= best_rate:
            best, best_rate = count, rate
    return best


@dataclass(frozen=True, slots=True)
class Policy:
    """How many guesses a pass scores, and when it waits for them.

    A pass takes the guesses at hand; only after a correction it may wait for some. Waiting for ``m`` guesses costs
    ``m / guesses`` passes, where ``guesses`` arrive during a pass. This is a renewal problem with two states: after a
    correction, and with guesses at hand. From the first state a pass gives ``1 + P(1) + ... + P(m)`` tokens, where ``P(i)`` is
    the chance that the first ``i`` guesses are right, and leads to the second state with chance ``P(m + 1)``. `waits_for`
    chooses the ``m`` with most tokens per pass in the long run.
    """

    patience: float = 1.0  # longest wait for guesses, as a share of one pass of this tier
    max_guesses: int = 16  # guesses scored in one pass at most

    def waits_for(self, stats: DraftStats, room: int) -> int:
        """Guesses that a pass after a correction waits for, at most ``room``; 0: it starts at once."""
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
