"""When to start a pass: a local rule of each tier. Pure; the serving tier and the simulator follow the same one."""

from dataclasses import dataclass

from cascade.session import Session

LOCKSTEP_PATIENCE_S = 5.0  # a lockstep verifier goes on without a whole window after this time: nothing hangs


@dataclass(frozen=True, slots=True)
class Policy:
    """Wait for one more guess while it is worth the wait, then start with those that are there.

    One more guess is of use if the ``k`` at hand are all right: with probability ``agreement ** k``. It takes the drafter
    ``1 / guesses`` passes of this tier to make it. The session measures both, see `cascade.session.Pace`. So a tier far
    slower than its drafter waits for a few guesses after a correction, and one that is not starts at once.
    """

    patience: float = 1.0  # longest wait for guesses, as a share of one pass of this tier
    guess_worth: float = 0.17  # what one more guess is worth if those before it are right, as a share of one pass
    max_guesses: int = 16  # guesses scored in one pass at most

    def start_at(self, session: Session, since: float, pass_s: float) -> float:
        """Time at which a session that has been idle ``since`` then should be scored with what it has; seconds.

        ``pass_s`` is what a pass of this tier costs. A time that has passed means now.
        """
        if not session.drafter or session.prefilling or not session.room:
            return since
        if session.opening.lockstep:
            return since if session.window_full else since + LOCKSTEP_PATIENCE_S
        pace, usable = session.pace, session.usable
        if usable < session.room and self.guess_worth * pace.agreement**usable > 1 / pace.guesses:
            return since + self.patience * pass_s
        return since
