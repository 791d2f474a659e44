"""Chooses the tiers below that draft for a tier's sessions: those of the plan, but failed ones only once they are retried."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple

from cascade.messages import Failed, Message, Open, Proposal
from cascade.planner.acceptance import Calibration
from cascade.planner.chains import ALONE, Chain, Planner, Seen
from cascade.planner.choice import NO_GUESS, Policy
from cascade.planner.cost import Profile
from cascade.planner.tuning import MAX_READING_SHARE, PREFILL_TOKENS, SCOUTS, SETTLING_PASSES, WARMEST
from cascade.session.session import Session, Work
from cascade.tier.slot import Slot, U

FIRST_BACKOFF_S = 0.25  # the first pause before a tier that failed is tried again
MAX_BACKOFF_S = 8.0


class Progress(NamedTuple, Generic[U]):
    """A session got ``num_new`` own tokens from a pass, ``seconds`` after its last ones."""

    slot: Slot[U]
    work: Work
    num_new: int
    seconds: float


class Failure(NamedTuple):
    """A tier below has failed, and is not tried again before ``retry_at``, in seconds of the loop's clock."""

    backoff_s: float  # twice as long as after the failure before
    retry_at: float


class Drafting(Generic[U]):
    """``send`` takes messages to the tier that it names. A session below is named after the one that it drafts for."""

    def __init__(self, send: Callable[[str, Message], None], planner: Planner) -> None:
        self._send = send
        self._planner = planner
        self._failures: dict[str, Failure] = {}  # by tier, until it works again
        self._calibrations: dict[tuple[str, float], Calibration] = defaultdict(Calibration)  # by drafter and temperature
        self._num_begun = 0

    def calibration(self, drafter: str, temperature: float) -> Calibration:
        """All sessions share it. Drafter "" is the tier itself, judged by the tier above. With more noise gaps tell less."""
        return self._calibrations[drafter, round(min(temperature, WARMEST), 1)]

    def begin(self, slot: Slot[U], num_sessions: int, now: float) -> None:
        """Find a drafter for a new session of ``num_sessions``. It has no time to settle: late first guesses count."""
        slot.allowed = slot.session.spec.chain
        self._num_begun += 1
        slot.scouts = self._num_begun % SCOUTS == 0
        self._plan((slot,), num_sessions)
        self.draft(slot, now)
        slot.settling = 0

    def draft(self, slot: Slot[U], now: float) -> float | None:
        """Draft with the first usable tier of the session's chain; when to try a better one, None if there is none."""
        chain, session = slot.chain, slot.session
        if session.done or slot.attached == chain:
            return None
        usable = self._usable(chain, now) or (self._usable(slot.allowed, now) if chain else ())
        if not chain:
            self.leave(slot)
        elif usable and slot.attached != usable:
            self.leave(slot)
            slot.num_drafters += 1
            slot.least_chance, slot.heard = 0.0, None
            name = f"{session.name}.{slot.num_drafters}"
            slot.opened_in_turns = usable[0] in self._planner.shared
            spec = session.attach(usable, name, in_turns=slot.opened_in_turns)
            session.guesses.calibration = self.calibration(usable[0], spec.params.temperature)
            slot.attached, slot.settling = usable, SETTLING_PASSES
            self._send(session.drafter, Open(session.drafter_session, spec, slot.routing))
        again_at = (failure.retry_at for tier, failure in self._failures.items() if tier in chain)
        return min((at for at in again_at if at > now), default=None)

    def _usable(self, chain: Chain, now: float) -> Chain:
        """The chain from the first tier that works; that tier takes care of those below it."""
        first = next((i for i, tier in enumerate(chain) if self._works(tier, now)), len(chain))
        return chain[first:]

    def _works(self, tier: str, now: float) -> bool:
        return tier not in self._failures or self._failures[tier].retry_at <= now

    def leave(self, slot: Slot[U]) -> None:
        """Detach the drafter, if there is one; to close a session that has failed is harmless."""
        drafter = slot.session.drafter
        closing = slot.session.detach()
        slot.attached, slot.least_chance = ALONE, 0.0
        if closing is not None:
            slot.settling = SETTLING_PASSES
            self._send(drafter, closing)

    def commit(self, slot: Slot[U]) -> None:
        """Send the tier below how the text continues."""
        news = slot.session.news()
        if news is not None:
            if slot.least_chance:
                news = replace(news, least_chance=slot.least_chance, most=slot.most)
            self._send(slot.session.drafter, news)

    def in_turns(self, slot: Slot[U]) -> bool:
        """Whether a session's drafter takes turns with this tier, because both compute on the same processors."""
        return slot.opened_in_turns and slot.session.drafter in self._planner.shared

    def turn(self, slot: Slot[U], num_in_turns: int, policy: Policy, profile: Profile) -> None:
        """The text has grown: choose how far a tier below on the same processors drafts before the next pass.

        All ``num_in_turns`` sessions of that pass wait for the longest draft, so each draft has a limit.
        """
        slot.least_chance, slot.most = 0.0, 0
        if self.in_turns(slot):
            slot.least_chance, most = _turn(slot.session, num_in_turns, policy, profile)
            slot.most = most if num_in_turns > 1 else 0
            slot.session.guesses.stats.interrupt()

    def waited(self, slot: Slot[U], profile: Profile) -> None:
        """A pass starts after waiting for guesses: learn how fast they arrive."""
        num_guess = slot.session.guesses.draft.height
        if slot.awaits_guesses and num_guess and slot.heard is not None and slot.heard > slot.since:
            slot.session.guesses.stats.waited(num_guess, (slot.heard - slot.since) / profile.pass_s)

    def receive(self, slot: Slot[U], message: Proposal | Failed, now: float) -> tuple[str, str] | None:
        """Handle a message from below; returns the drafter and the reason if a drafter is lost, else None."""
        if message.session != slot.session.drafter_session:  # from an earlier drafter
            return None
        drafter = slot.session.drafter
        if isinstance(message, Proposal):
            slot.session.propose(message)
            slot.settling, slot.heard = 0, now
            self._failures.pop(drafter, None)
            return None
        if message.fault:  # the tier cannot draft for this session, but for others; another tier may draft for this one
            slot.allowed, slot.chain = (
                tuple(tier for tier in chain if tier != drafter) for chain in (slot.allowed, slot.chain)
            )
        elif self._works(tier := message.tier or drafter, now):  # a dead replica fails many sessions: they count once
            before_s = self._failures[tier].backoff_s if tier in self._failures else FIRST_BACKOFF_S / 2
            backoff_s = min(MAX_BACKOFF_S, 2 * before_s)
            self._failures[tier] = Failure(backoff_s, now + backoff_s)
        self.leave(slot)
        self.draft(slot, now)
        return drafter, message.reason

    def passed(
        self,
        slots: Collection[Slot[U]],
        num_sessions: int,
        rows: Sequence[Progress[U]],
        profile: Profile,
        num_read: int,
        now: float,
    ) -> None:
        """A pass gave own tokens to ``rows`` and read ``num_read`` tokens; at its end the tier had ``num_sessions`` sessions.

        ``slots`` are the present sessions. Rates leave out the time for reading, which varies from pass to pass whichever tiers
        draft.
        """
        reading_s = profile.token_s * num_read
        alone_s = profile.turn(len(rows), sum(row.work.start for row in rows))
        totals: dict[tuple[Chain, bool, Chain, bool], list[tuple[int, float]]] = {}
        for slot, work, num_new, seconds in rows:
            settled = not slot.settling
            slot.settling -= not settled
            if slot.planned and work.num_read < PREFILL_TOKENS:
                key = (slot.allowed, slot.sampled, slot.chain, settled)
                totals.setdefault(key, []).append((num_new, seconds - min(reading_s, MAX_READING_SHARE * seconds)))
        num_rows, lengths = Counter[tuple[Chain, bool]](), defaultdict[tuple[Chain, bool], list[int]](list)
        for (allowed, sampled, *_), had in totals.items():
            num_rows[allowed, sampled] += len(had)
        for slot in dict.fromkeys([*slots, *(row.slot for row in rows)]) if totals else ():  # also those that just ended
            if slot.planned:
                lengths[slot.allowed, slot.sampled].append(len(slot.session.text))
        for (allowed, sampled, chain, settled), had in totals.items():
            tokens, seconds = map(sum, zip(*had, strict=True))
            part, of_kind = len(had) / num_rows[allowed, sampled], lengths[allowed, sampled]
            share = part * min(1.0, len(of_kind) / num_sessions)
            seen = Seen(len(had), tokens, seconds, alone_s, settled, share, part * profile.token_s * sum(of_kind))
            self._planner.record(allowed, chain, num_sessions, seen, sampled=sampled)
        self._plan(slots, len(slots))
        for slot in slots:
            self.draft(slot, now)

    def _plan(self, slots: Collection[Slot[U]], num_sessions: int) -> None:
        """Choose a chain for each session, the same for all of a kind (tiers allowed, greedy or sampled, scout or not)."""
        planned: dict[tuple[Chain, bool, bool], tuple[Chain, str]] = {}
        for slot in slots:
            if not slot.planned:
                slot.chain = slot.allowed
                continue
            kind = slot.allowed, slot.sampled, slot.scouts
            if kind not in planned:
                chain = self._planner.chain(slot.allowed, num_sessions, sampled=slot.sampled, scouts=slot.scouts)
                why = self._planner.undrafted(slot.allowed, num_sessions, sampled=slot.sampled) if not chain else ""
                planned[kind] = chain, why
            slot.chain, slot.session.skip_reason = planned[kind]


def _turn(session: Session, num_in_turns: int, policy: Policy, profile: Profile) -> tuple[float, int]:
    """See `Policy.turn`; a session that waits for the tier above needs no guesses yet."""
    if session.stalled:
        return NO_GUESS, 0
    at_hand = max(
        (sum(hint.calibration.chances(hint.draft.trunk)[: session.max_depth]) for hint in session.guesses.hints), default=0.0
    )
    room = min(session.max_depth, policy.max_guesses)
    cost = profile.turns(num_in_turns * (room + 2), num_in_turns * session.kv_len)[::num_in_turns]
    return policy.turn(session.guesses.stats, room, at_hand, cost)
