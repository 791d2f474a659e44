"""When a tier starts a pass: at once, or when guesses that are worth their time have come. Pure."""

from dataclasses import dataclass

from cascade.chain.draft_stats import DraftStats


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
