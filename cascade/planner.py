"""When to start a pass: a local rule of each tier. Pure; the serving tier and the simulator follow the same one."""

from dataclasses import dataclass

from cascade.session import Session

LOCKSTEP_PATIENCE_S = 5.0  # a lockstep verifier goes on without a whole window after this time: nothing hangs


@dataclass(frozen=True, slots=True)
class Policy:
    """Start with whatever guesses are there; when there are none, wait a fraction of a pass, then go alone."""

    patience: float = 0.5  # longest wait for guesses, as a share of one pass of this tier
    wanted: int = 1  # guesses to wait for; a pass starts at once with that many
    max_guesses: int = 16  # guesses scored in one pass at most

    def start_at(self, session: Session, since: float, pass_s: float) -> float:
        """Time at which a session that has been idle ``since`` then should be scored with what it has; seconds.

        ``pass_s`` is what a pass of this tier costs. A time that has passed means now.
        """
        if not session.drafter or session.prefilling or not session.room:
            return since
        if session.opening.lockstep:
            return since if session.window_full else since + LOCKSTEP_PATIENCE_S
        if session.usable >= min(self.wanted, session.room):
            return since
        return since + self.patience * pass_s
