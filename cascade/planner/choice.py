"""How many guesses a pass scores, and when a pass waits for one. Pure.

Each candidate of a pass (a guess, or a step of a branch) has a chance that the text takes its path. A pass that scores
candidates with chances ``p`` gives ``own + sum(p)`` tokens in the seconds that a pass of its size takes. The best pass gives
the most tokens per second. So under load, where every token of a pass costs time, trees shrink to lines and lines to nothing.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cascade.planner.acceptance import DraftStats
from cascade.planner.cost import LEAST_S
from cascade.planner.tuning import GUESS_PRICE

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

NO_GUESS = 2.0  # a least chance that no guess reaches, so none is drafted


def affordable(chances: Floats, sizes: Ints, own: float, tokens: int, cost: Floats) -> int:
    """How many of the likeliest candidates are worth scoring.

    Candidates have ``chances`` ``[n]``, decreasing, and ``sizes`` ``[n]``, the tokens that they add. Without them the pass
    reads ``tokens`` tokens and gives ``own`` tokens of text. ``cost`` ``[most + 1]`` is the seconds of a pass by its tokens.
    """
    read = tokens + np.cumsum(sizes)
    read = read[: np.searchsorted(read, len(cost))]
    if not len(read):
        return 0
    alone_s = max(float(cost[tokens]), LEAST_S)
    rates = (own + np.cumsum(chances[: len(read)])) / np.maximum(alone_s + GUESS_PRICE * (cost[read] - alone_s), LEAST_S)
    best = len(rates) - 1 - int(rates[::-1].argmax())  # the last of equal rates
    return best + 1 if not tokens or rates[best] >= own / alone_s else 0


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
        """How many guesses a pass after a correction waits for, at most ``room``; 0: it starts at once."""
        most = int(min(room, self.max_guesses, self.patience * stats.guesses))
        share = min(stats.share, 0.999)
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

    def turn(self, stats: DraftStats, room: int, at_hand: float, cost: Floats) -> tuple[float, int]:
        """For a drafter in turns with its verifier on the same processors: the least chance of its text at which another guess
        pays, and the best number of guesses.

        While the drafter makes a guess, which takes ``1 / stats.guesses`` of a pass, the verifier is idle. In that time it
        could give tokens at the best rate that drafting reaches, so a guess must be right with a higher chance than that. The
        chance is `NO_GUESS` if a pass with the guesses of drafters inside the tier, ``at_hand`` of which are expected to be
        right, is as good. ``room`` is how many guesses the pass can use, ``cost`` ``[more than room]`` the seconds of a pass
        by its tokens of each session.
        """
        guess_s = float(cost[1]) / stats.guesses
        counts = np.arange(1 + min(room, self.max_guesses))
        tokens = np.cumsum([stats.chance(count) for count in counts.tolist()])
        seconds = cost[1 + counts] + guess_s * counts
        best = int((tokens / seconds).argmax())
        rate = float(tokens[best] / seconds[best])
        if room < 1 or (at_hand and (1 + at_hand) / float(cost[1 + min(room, round(at_hand))]) >= rate):
            return NO_GUESS, 0
        added_s = (float(seconds[best]) - float(seconds[0])) / max(1, best)  # seconds to draft and score a guess
        spared = rate * max(guess_s, added_s)  # tokens that the verifier could give meanwhile
        return (spared / stats.share if spared < stats.share else 1.0), max(1, best)
