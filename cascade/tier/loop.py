"""The work of a tier around its passes: receive messages, schedule rows, settle, advance. Has no thread, clock or model.

The serving tier adds these; the simulator adds virtual time. All times are in seconds on one clock.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias

from cascade.draft import Draft
from cascade.errors import InvalidRequest, reason
from cascade.messages import Commit, Failed, Message, Open, Proposal, SessionSpec
from cascade.planner.chains import Planner
from cascade.planner.choice import Policy
from cascade.planner.cost import Profile
from cascade.scorer import Drafter, Guesser, Query, RowState, Scored
from cascade.session.guesses import Hint
from cascade.session.session import ProtocolError, Session, Work
from cascade.tier.drafting import Drafting, Progress
from cascade.tier.kv_admission import KVAdmission
from cascade.tier.scheduler import Batch, schedule
from cascade.tier.slot import InnerDrafter, Slot, U

log = logging.getLogger(__name__)

# makes the state of a session from its spec and its growing text; raises `InvalidRequest`
NewState: TypeAlias = Callable[[SessionSpec, Sequence[int]], RowState]
# the result of a row; None if it cannot be scored, an error if the request is at fault
Result: TypeAlias = Scored | InvalidRequest | None
# a session, a drafter inside the tier, and the query to it
Asked: TypeAlias = tuple[Slot[U], InnerDrafter, Query]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tier: the sessions that it takes, and how its passes are filled."""

    vocab_size: int
    context_len: int
    policy: Policy
    new_state: NewState | None = None


class Loop(Generic[U]):
    """Sessions of the tier ``name``, ``level`` tiers above the bottom one.

    ``send_up`` takes messages for the openers of sessions, each named as in `receive`; ``send_down`` takes messages for a tier
    below, by its name. ``drafters`` guess inside the tier, where a request allows it.
    """

    has_below = True  # False: there is no tier below, and sessions leave their chains unused

    def __init__(
        self,
        name: str,
        level: int,
        limits: Limits,
        kv_admission: KVAdmission,
        profile: Profile,
        *,
        send_up: Callable[[U, Message], None],
        send_down: Callable[[str, Message], None],
        planner: Planner | None = None,
        drafters: Sequence[Drafter] = (),
    ) -> None:
        self.slots: dict[str, Slot[U]] = {}  # one for each session
        self.agreed = self.corrected = 0  # own tokens of ended sessions, as the tier above has judged them
        self.kv_admission = kv_admission
        self._changed: dict[Slot[U], None] = {}  # sessions for which `settle` has something to send or to learn
        self._to_draft: dict[Slot[U], None] = {}  # sessions with new texts, after which drafters have not guessed yet
        self._batch: Batch[U] = []  # the last pass
        self._progress: list[Progress[U]] = []  # gains of its rows
        self._num_sessions = 0  # sessions at its end
        self._name = name
        self._level = level
        self._limits = limits
        self._profile = profile
        self._send_up = send_up
        self._drafting: Drafting[U] = Drafting(send_down, planner or Planner())
        self._drafters = drafters

    # receive

    def receive(self, message: Message, up: U | None, now: float) -> None:
        """Handle a message from above or below; ``up``, given with an Open, receives its session's proposals."""
        if isinstance(message, Commit):
            if (slot := self.slots.get(message.session)) is not None:  # it may have failed meanwhile
                self._commit(slot, message, now)
        elif isinstance(message, Open):
            assert up is not None
            self._open(message, up, now)
        elif isinstance(message, Proposal | Failed):
            slot = self.slots.get(message.session.rpartition(".")[0])  # the session for which it drafts, see `Drafting.draft`
            lost = self._drafting.receive(slot, message, now) if slot is not None else None
            if lost is not None:
                log.info("Tier %s continues without %s: %s", self._name, *lost)
        elif message.session in self.slots:  # a Close
            self._leave(self.slots[message.session])

    def drop(self, up: U) -> None:
        """``up`` is gone: close all sessions that it opened."""
        for slot in [slot for slot in self.slots.values() if slot.up is up]:
            self._leave(slot)

    def fail_all(self, reason: str) -> None:
        for slot in list(self.slots.values()):
            self._fail(slot, reason)

    def _open(self, opening: Open, up: U, now: float) -> None:
        if opening.session in self.slots:
            self._send_up(up, Failed(opening.session, f"session {opening.session} is open already", self._name))
            return
        spec = opening.spec
        verdicts = self._drafting.calibration("", spec.params.temperature)
        session = Session(opening, self._name, self._level, self._limits.vocab_size, verdicts)
        try:
            self._check(spec)
            state = self._new_state(spec, session.text)
        except Exception as error:  # the library for grammars may raise anything
            self._send_up(up, Failed(opening.session, reason(error), self._name, fault=isinstance(error, InvalidRequest)))
            return
        drafters = self._inner_drafters(spec)
        slot = Slot(session, up, since=now, opened=now, routing=opening.routing, state=state, drafters=drafters)
        self.slots[session.name] = slot
        if self.has_below:
            self._drafting.begin(slot, len(self.slots), now)

    def _inner_drafters(self, spec: SessionSpec) -> tuple[InnerDrafter, ...]:
        begun: list[InnerDrafter] = []
        for drafter in self._drafters:
            if drafter.name in spec.drafters:
                try:
                    calibration = self._drafting.calibration(drafter.name, spec.params.temperature)
                    begun.append(InnerDrafter(drafter.name, calibration, drafter.begin(spec.cache_salt)))
                except Exception:
                    self._remove([], drafter.name)
        return tuple(begun)

    def _notify(self, slot: Slot[U], event: Callable[[Guesser], None]) -> None:
        for drafter in slot.drafters:
            try:
                event(drafter.guesser)
            except Exception:
                self._remove([slot], drafter.name)

    def _remove(self, slots: Iterable[Slot[U]], drafter: str) -> None:
        """Let sessions continue without a drafter that has just raised."""
        log.exception("Sessions of tier %s go on without the drafter %s, which raised", self._name, drafter)
        for slot in slots:
            slot.drafters = tuple(other for other in slot.drafters if other.name != drafter)

    def _check(self, spec: SessionSpec) -> None:
        """Raise `InvalidRequest` if no replica of this tier can serve a session."""
        name, limits = self._name, self._limits
        end = spec.prompt_len + spec.params.max_tokens
        if end > limits.context_len:
            raise InvalidRequest(f"tier {name} takes {limits.context_len} tokens, the request may need {end}")
        if not 0 <= min(spec.tokens) <= max(spec.tokens) < limits.vocab_size:
            raise InvalidRequest(f"tier {name} has {limits.vocab_size} token ids and the text has others")
        if lack := self.kv_admission.problem(end):
            raise InvalidRequest(f"tier {name} cannot hold the session: {lack}")

    def _new_state(self, spec: SessionSpec, text: Sequence[int]) -> RowState | None:
        """The state on which own tokens depend besides logits, or None; raises `InvalidRequest`."""
        if not spec.params.shaped:
            return None
        if self._limits.new_state is None:
            raise InvalidRequest(f"tier {self._name} honours only temperature, top_k, top_p and min_p")
        return self._limits.new_state(spec, text)

    def _commit(self, slot: Slot[U], commit: Commit, now: float) -> None:
        stalled = slot.session.stalled
        try:
            correction = slot.session.commit(commit.start, commit.tokens, commit.least_chance, commit.most)
        except (ProtocolError, InvalidRequest) as error:
            self._fail(slot, str(error), fault=isinstance(error, InvalidRequest))
            return
        if slot.session.branches is not None:
            self.kv_admission.settle(slot, correction.branch if correction is not None else None)
        if correction is not None:
            if slot.state is not None:
                slot.state.rewind(correction.start)  # now, since the next row may begin after an accepted branch
            self._notify(slot, lambda guesser: guesser.cut())
            self._changed[slot] = self._to_draft[slot] = None
        elif stalled and self._drafting.in_turns(slot):
            slot.session.recall()  # the tier below rests, too, and needs a commit to start again
            self._changed[slot] = self._to_draft[slot] = None
        if slot.session.spec.in_turns and slot.session.stalled and commit.least_chance <= 1:
            self._changed[slot] = None  # the tier above waits for the message that no more guesses come
        if correction is not None or stalled:
            slot.since = now

    # schedule

    def schedule(self, max_tokens: int, now: float) -> tuple[Batch[U], float | None]:
        """The rows of the next pass, of at most ``max_tokens``; if none, when to try again (None: when a message comes)."""
        self._draft()
        wake_at: float | None = None
        for slot in self.slots.values():
            if slot.attached != slot.chain:  # does not draft with the chosen tiers yet
                wake_at = earliest(wake_at, self._drafting.draft(slot, now))
        able, lost, retry_at = self.kv_admission.admit(self.slots.values(), self._limits.policy.max_guesses, now)
        for slot in lost:
            self._fail(slot, f"tier {self._name} has no memory for the session")
        batch, start_at = schedule(able, self._limits.policy, self._profile, max_tokens, now)
        batch = [(slot, work) for slot, work in batch if work.branch is None or self._fork(slot, work)]
        for slot, work in batch:
            if work.num_own and work.branch is None:
                slot.session.totals.current.waited_s += now - slot.since
                self._drafting.waited(slot, self._profile)
        return batch, earliest(wake_at, start_at, retry_at)

    def _draft(self) -> None:
        """Let each drafter inside the tier guess after all new texts at once; set how far tiers in turns shall draft."""
        if not self._to_draft:
            return
        policy, slots = self._limits.policy, self._to_draft
        self._to_draft = {}
        queries: dict[str, list[Asked[U]]] = {drafter.name: [] for drafter in self._drafters}
        for slot in slots:
            session = slot.session
            if slot.asks_drafters and not session.stalled:
                most = min(session.max_depth, policy.max_guesses, session.spec.draft_window)
                for drafter in slot.drafters:
                    query = drafter.guesser, session.text, session.changed_from, most
                    queries[drafter.name].append((slot, drafter, query))
        hints: dict[Slot[U], list[Hint]] = {}
        for rows in queries.values():
            for (slot, drafter, _), draft in zip(rows, self._guess(rows), strict=True):
                if draft is not None:
                    hints.setdefault(slot, []).append(Hint(drafter.name, drafter.calibration, draft))
        for slot, of_slot in hints.items():
            slot.session.hint(of_slot)
        drafted = [slot for slot in slots if slot.attached]
        num_in_turns = sum(map(self._drafting.in_turns, self.slots.values())) if drafted else 0
        for slot in drafted:
            self._drafting.turn(slot, num_in_turns, policy, self._profile)

    def _guess(self, rows: Sequence[Asked[U]]) -> list[Draft | None]:
        """The guesses of one drafter after each text; None where it raises, and that session continues without it."""
        try:
            return list(type(rows[0][1].guesser).guess_all([query for _, _, query in rows])) if rows else []
        except Exception:
            if len(rows) == 1:
                slot, drafter, _ = rows[0]
                self._remove([slot], drafter.name)
                return [None]
        # a call for all texts does not show which text made it raise: each is tried by itself, in this pass
        return [draft for row in rows for draft in self._guess([row])]

    def _fork(self, slot: Slot[U], work: Work) -> bool:
        """Give a branch memory, or give the branch up if there is none; returns whether it has memory."""
        session, branch = slot.session, work.branch
        assert branch is not None
        assert session.branches is not None
        self.kv_admission.settle(slot)
        if branch in session.branches.held and branch not in slot.forks:
            text = [*session.text[: branch.start], *branch.tokens]
            if not self.kv_admission.fork(slot, branch, text, self._new_state(session.spec, text)):
                session.branches.held.remove(branch)
        return branch in slot.forks

    # advance

    def advance(self, batch: Batch[U], results: Sequence[Result], now: float) -> None:
        """Give sessions the results of a pass that ends ``now``, as far as the next pass needs them; `settle` does the rest."""
        progress, changed = self._progress, self._changed
        for (slot, work), result in zip(batch, results, strict=True):
            if work.branch is not None:
                changed[slot] = None
                self._advance_branch(slot, work, result)
                continue
            if not isinstance(result, Scored):
                reason = f"a pass of tier {self._name} failed" if result is None else str(result)
                self._fail(slot, reason, fault=result is not None)
                continue
            changed[slot] = None
            seconds, slot.since = now - slot.since, now
            num_new = slot.session.advance(work, result)
            if num_new:
                progress.append(Progress(slot, work, num_new, seconds))
                slot.unscored = 0 if work.draft else slot.unscored + 1
                if slot.drafters:
                    self._observe(slot, work, result)
                if slot.drafters or slot.attached:
                    self._to_draft[slot] = None
        self._batch, self._num_sessions = batch, len(self.slots)

    def settle(self, now: float) -> None:
        """Send and learn what the last pass and corrections have decided. This touches no keys and values, so the next pass
        may run meanwhile."""
        changed, self._changed = self._changed, {}
        for slot in changed:
            if self.slots.get(slot.session.name) is slot:
                self.kv_admission.scored(slot)
                slot.session.settle()
                self._drafting.commit(slot)
                self._propose(slot)
        batch, self._batch = self._batch, []
        if batch:
            num_read = sum(work.num_read for _, work in batch)
            self._drafting.passed(self.slots.values(), self._num_sessions, self._progress, self._profile, num_read, now)
            self._progress.clear()

    def _observe(self, slot: Slot[U], work: Work, result: Scored) -> None:
        self._notify(slot, lambda guesser: guesser.observe(work.tokens[-1], work.draft, result))

    def _advance_branch(self, slot: Slot[U], work: Work, result: Result) -> None:
        """Append the own token to a branch; a branch that could not be scored is given up."""
        branch, branches = work.branch, slot.session.branches
        assert branch is not None
        assert branches is not None
        if branch not in slot.forks:
            return  # the session has failed
        if isinstance(result, Scored):
            slot.session.advance(work, result)
            slot.forks[branch].text.append(branch.tokens[-1])
        else:
            branches.held = [other for other in branches.held if other is not branch]  # it may have been replaced already
            self.kv_admission.settle(slot)

    def _propose(self, slot: Slot[U]) -> None:
        proposal, state = slot.session.proposal(), slot.state
        if proposal is None:
            return
        if state is not None and slot.session.spec.params.logprobs is not None:
            proposal = replace(proposal, logprobs=state.logprobs(proposal.start, len(proposal.draft)))
        if state is not None and proposal.start == state.prompt_len:
            proposal = replace(proposal, prompt_logprobs=state.prompt_logprobs)
        self._send_up(slot.up, proposal)

    def _leave(self, slot: Slot[U], *, spoilt: bool = False) -> None:
        """Free all that the session occupies, here and below; its keys and values are not reused if they may be ``spoilt``."""
        self._drafting.leave(slot)
        self.agreed += slot.session.run_ahead.num_kept
        self.corrected += slot.session.run_ahead.num_cut
        self._notify(slot, lambda guesser: guesser.close(slot.session.text))
        self._to_draft.pop(slot, None)
        del self.slots[slot.session.name]
        self.kv_admission.leave(slot, spoilt=spoilt)

    def _fail(self, slot: Slot[U], reason: str, *, fault: bool = False) -> None:
        self._leave(slot, spoilt=True)
        self._send_up(slot.up, Failed(slot.session.name, reason, self._name, fault))


def earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)
