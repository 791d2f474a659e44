"""When a tier starts a pass: at once, or when guesses that are worth their time have come. Pure."""

from dataclasses import dataclass

from cascade.chain.session import Session

LOCKSTEP_PATIENCE_S = 5.0  # a lockstep verifier goes on without a whole window after this time: nothing hangs


@dataclass(frozen=True, slots=True)
class Policy:
    """Go on with whatever guesses are there; only behind a correction wait for those that are worth it.

    A guess saves some of a pass if it and the guesses before it are right. While that is more than the time the drafter
    needs to make it, wait for it. The session measures both in passes, see `DraftStats`: a tier far slower than
    its drafter waits for a few guesses, one that is not starts at once. Simulated over sixteen cascades, bursts of errors
    included: pairs and threes are on average within 1.5 % of the best rule of this kind, and at worst within 10 %.
    """

    patience: float = 1.0  # longest wait for guesses, as a share of one pass of this tier
    guess_worth: float = 0.12  # what a right guess saves, as a share of one pass
    max_guesses: int = 16  # guesses scored in one pass at most

    def start_at(self, session: Session, since: float, pass_s: float) -> float:
        """Time at which a session that has been idle ``since`` then should be scored with what it has; seconds.

        ``pass_s`` is what a pass of this tier costs. A time that has passed means now.
        """
        if not session.drafter or session.prefilling or not session.room:
            return since
        if session.opening.lockstep:
            return since if session.window_full else since + LOCKSTEP_PATIENCE_S
        stats, usable = session.guessed.stats, session.usable
        worth = self.guess_worth * stats.chance(usable + 1)
        if stats.interrupted and usable < session.room and worth > 1 / stats.guesses:
            return since + self.patience * pass_s
        return since
