"""An audit: a text that was sent is scored again by the tier alone, position by position, and compared.

The session is given the whole text. A pass reads a piece of it, and says for each position the own token behind the text as
it was *sent*: a token that differs is one divergence, whatever comes behind it. Nothing that other sessions have left in
memory is reused, so keys and values are judged as well.

An audit has a tier to itself. It is refused while there are other sessions, and ends when one comes (`AUDIT_YIELDS`); its
passes are as short as those that read beside sessions that write.
"""

import math
from collections.abc import Sequence

from cascade.chain.calibration import Calibration
from cascade.chain.session import MAX_PROMPT_SCORED, Session
from cascade.chain.work import Work
from cascade.draft import NO_DRAFT
from cascade.messages import RUNNER_UPS, Divergence, Open, Proposal
from cascade.scorer import RunnerUp, Scored


class Audit(Session):
    """A session that judges the text it was opened with, from position ``opening.audit`` on, and writes nothing."""

    __slots__ = ("_divergences", "_end", "_reported")

    def __init__(self, opening: Open, tier: str, level: int, vocab_size: int, verdicts: Calibration | None = None) -> None:
        super().__init__(opening, tier, level, vocab_size, verdicts)
        assert opening.prompt_len <= opening.audit < len(self.text), "an audit judges output"
        self._divergences: list[Divergence] = []
        self._end = len(self.text)  # up to which it judges
        self._reported = False

    @property
    def stalled(self) -> bool:
        """All is judged."""
        return self.kv_len >= self._end - 1

    @property
    def room(self) -> int:
        """Nothing is written behind the text."""
        return 0

    @property
    def runner_ups(self) -> int:
        """They tell margins."""
        return RUNNER_UPS

    def work(self, max_tokens: int, nodes: Sequence[int] | None = None) -> Work:
        """The next piece, at most ``max_tokens`` positions, with the own tokens behind those that come before judged ones."""
        assert not self.stalled
        first = max(self.kv_len, self.opening.audit - 1)
        end = min(self.kv_len + max_tokens, first + MAX_PROMPT_SCORED, self._end - 1)
        return Work(self.kv_len, self.text[self.kv_len : end], max(0, end - first))

    def advance(self, work: Work, scored: Scored) -> None:
        """Compare. Where own tokens end before the piece does, it was not known what the grammar allows."""
        assert self.kv_len == work.start
        self.kv_len += work.num_read + len(scored.own)
        position = work.start + work.num_read + 1
        beside = scored.runner_ups or ((),) * len(scored.own)
        for own, others in zip(scored.own, beside, strict=True):
            if own != self.text[position] and position < self._end:
                self._diverged(position, own, others)
            position += 1

    def _diverged(self, position: int, own: int, others: Sequence[RunnerUp]) -> None:
        sent = self.text[position]
        margin, second = (others[0].gap, others[0].token == sent) if others else (math.inf, False)
        self._divergences.append(Divergence(position, sent, own, margin, second))
        if self.opening.params.structured is not None:  # it may not allow what was sent: then it says nothing of what follows
            self._end = position + 1

    def proposal(self) -> Proposal | None:
        """The verdict, once, when all is judged."""
        if not self.stalled or self._reported:
            return None
        self._reported = True
        return Proposal(self.opening.session, self._end, NO_DRAFT, divergences=tuple(self._divergences))
