"""A tier: one model, many sessions, one loop in a thread of its own with three verbs: schedule, run, advance.

Prefill chunks, verification of guesses and plain decoding are the same thing here: "score these tokens from this position".
The loop never waits for a link: messages come in through `Tier.post` and go out through `Link.send`, neither of which blocks.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from cascade.chain.drafting import Drafters
from cascade.chain.kv_admission import MEMORY_RETRY_S, KVAdmission
from cascade.chain.planner import Planner, Policy
from cascade.chain.profile import Profile
from cascade.chain.runner import Own, Runner, TierStats
from cascade.chain.scheduler import schedule
from cascade.chain.session import ProtocolError, Session, Work
from cascade.chain.slot import Slot
from cascade.errors import InvalidRequest
from cascade.messages import Close, Commit, Failed, Link, Message, Open, Proposal, mint
from cascade.scorer import RowState, Scorer

log = logging.getLogger(__name__)

# from a session's opening, and its text while it grows; raises `InvalidRequest`
NewState: TypeAlias = Callable[[Open, Sequence[int]], RowState]

WATCH_S = 0.02  # between two proposals of a watched session that bring no new tokens


class Tier:
    """Serves sessions of the model ``model`` as the tier ``name``, ``level`` tiers above the bottom one.

    ``below`` is the link to the tiers below: it gets Opens that name the tier they are for, and what follows of their
    sessions. Their answers come back through `post`. Keys and values of at most ``cache_tokens`` positions are held, by
    default as many as there is memory for. ``profile`` is what passes cost, kept current from then on. ``new_state`` makes
    what sampling parameters need beside the logits of a pass; without it requests with such parameters fail. ``planner``
    leaves out tiers below that do not pay.
    """

    def __init__(
        self,
        name: str,
        level: int,
        model: Scorer,
        *,
        below: Link | None = None,
        policy: Policy = Policy(),
        planner: Planner | None = None,
        max_pass_tokens: int = 512,
        cache_tokens: int | None = None,
        profile: Profile | None = None,
        new_state: NewState | None = None,
    ) -> None:
        self.name = name
        self.level = level
        self.below = below
        self.kv_admission = KVAdmission(model.new_cache, cache_tokens or model.cache_tokens)
        self._model = model
        self._policy = policy
        self._runner = Runner(name, model, max_pass_tokens, profile)
        self.stats = self._runner.stats
        self._new_state = new_state
        self._slots: dict[str, Slot] = {}
        self._drafters: Drafters[Slot] = Drafters(self._send_down, mint, planner or Planner())
        self._untold: dict[str, Slot] = {}  # watched ones with guesses that the tier above has not heard of
        self._last_pass_at = 0.0
        self._inbox: queue.SimpleQueue[tuple[Sequence[Message], Link | None] | Link | None] = queue.SimpleQueue()
        self._out: dict[Link, list[Message]] = defaultdict(list)
        self._thread = threading.Thread(target=self._serve, name=f"tier-{name}", daemon=True)
        self._stopped = False

    # from any thread

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def post(self, messages: Sequence[Message], up: Link | None = None) -> None:
        """Hand over messages; Opens come with the link that takes their session's proposals."""
        self._inbox.put((messages, up))
        if self._stopped:
            self._refuse()

    def drop(self, up: Link) -> None:
        """The link ``up`` is broken: close all its sessions."""
        self._inbox.put(up)

    def close(self) -> None:
        """Stop, close all sessions here and below, free everything. Sessions opened later fail at once."""
        self._inbox.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def healthy(self) -> bool:
        """The loop runs and its model works."""
        return self._thread.is_alive() and self._runner.healthy

    @property
    def num_sessions(self) -> int:
        return len(self._slots)

    # the loop

    def _serve(self) -> None:
        try:
            wake_at: float | None = None
            while self._receive(wake_at):
                if self._untold:
                    self._tell()
                batch, wake_at = self._schedule(time.monotonic())
                if batch:
                    own = self._runner.run(batch)
                    self._advance(batch, own)
                    wake_at = 0.0
                self._flush()
        finally:
            for slot in list(self._slots.values()):
                self._fail(slot, f"tier {self.name} stopped")
            self.kv_admission.block_manager.clear()
            self._flush()
            self._stopped = True
            self._refuse()

    def _refuse(self) -> None:
        """Answer the Opens that came too late."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, tuple) and (up := item[1]) is not None:
                    late = [m.session for m in item[0] if isinstance(m, Open)]
                    up.send([Failed(session, f"tier {self.name} stopped", self.name) for session in late])

    def _receive(self, wake_at: float | None) -> bool:
        """Take in all messages, waiting for one until ``wake_at`` (for ever if None); False when told to stop."""
        try:
            item = self._inbox.get(timeout=None if wake_at is None else max(0.0, wake_at - time.monotonic()))
            while item is not None:
                self._take(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _schedule(self, now: float) -> tuple[list[tuple[Slot, Work]], float | None]:
        """The rows of the next pass, and when to look again if there are none (None: when a message comes)."""
        slots = self._slots.values()
        wake_at: float | None = None
        for slot in slots:
            if slot.degraded:
                wake_at = _earlier(wake_at, self._drafters.draft(slot, now))
        able, waiting = self.kv_admission.admit(slots, self._policy.max_guesses, now)
        batch, again_at = schedule(able, self._policy, self._runner.costs, self._runner.max_tokens, now)
        return batch, _earlier(_earlier(wake_at, again_at), now + MEMORY_RETRY_S if waiting else None)

    def _advance(self, batch: list[tuple[Slot, Work]], own: Sequence[Own]) -> None:
        """Sessions take their own tokens; messages go out."""
        now = time.monotonic()
        seconds = now - max(self._last_pass_at, min(slot.since for slot, _ in batch))
        self._last_pass_at = now
        rows: list[tuple[Slot, Work, int]] = []
        for (slot, work), tokens in zip(batch, own, strict=True):
            if not isinstance(tokens, list):
                reason = f"a pass of tier {self.name} failed" if tokens is None else str(tokens)
                self._fail(slot, reason, fault=tokens is not None)
                continue
            slot.since = now
            commit = slot.session.advance(work, tokens[: work.num_own])
            ahead = tokens[work.num_own :]
            slot.session.follow(ahead)
            self.kv_admission.scored(slot)
            if commit is not None:
                rows.append((slot, work, len(commit.tokens) + len(ahead)))
                self._drafters.tell(slot, commit)
                self._up(slot, slot.session.proposal())
        self._drafters.passed(self._slots.values(), rows, seconds, now)

    def _flush(self) -> None:
        while self._out:
            link, messages = self._out.popitem()
            try:
                link.send(messages)
            except Exception:  # a broken link must not harm the sessions of others
                log.exception("A link of tier %s broke", self.name)
                self._drop(link)

    # messages

    def _take(self, item: tuple[Sequence[Message], Link | None] | Link) -> None:
        if not isinstance(item, tuple):
            self._drop(item)
            return
        messages, up = item
        for message in messages:
            if isinstance(message, Open):
                assert up is not None
                self._open(message, up)
            elif isinstance(message, Proposal | Failed):
                self._hear(message)
            elif message.session in self._slots:
                self._obey(self._slots[message.session], message)

    def _tell(self) -> None:
        """Send the guesses of watched sessions up, before the pass that judges them."""
        now = time.monotonic()
        for name, slot in [(name, slot) for name, slot in self._untold.items() if now - slot.told > WATCH_S]:
            del self._untold[name]
            if self._drafters.slot(name) is slot:
                slot.told = now
                self._up(slot, slot.session.proposal())
        self._flush()

    def _drop(self, up: Link) -> None:
        for slot in [s for s in self._slots.values() if s.up is up]:
            self._leave(slot)

    def _open(self, opening: Open, up: Link) -> None:
        now = time.monotonic()
        end = opening.prompt_len + opening.params.max_tokens
        problem = None
        if end > self._model.context_len:
            problem = f"tier {self.name} takes {self._model.context_len} tokens, the request may need {end}"
        elif not all(0 <= token < self._model.vocab_size for token in opening.tokens):
            problem = f"tier {self.name} has {self._model.vocab_size} token ids and the text has others"
        elif lack := self.kv_admission.problem(end):
            problem = f"tier {self.name} cannot hold the session: {lack}"
        elif opening.session in self._slots:
            problem = f"session {opening.session} is open already"
        if problem:
            self._out[up].append(Failed(opening.session, problem, self.name))
            return
        session = Session(opening, self.name, self.level, self._model.vocab_size)
        try:
            state = self._state(session)
        except InvalidRequest as error:
            self._out[up].append(Failed(opening.session, str(error), self.name))
            return
        slot = Slot(session, up, since=now, opened=now, state=state)
        self._slots[opening.session] = slot
        if self.below is not None:
            self._drafters.begin(slot, len(self._slots), now)

    def _state(self, session: Session) -> RowState | None:
        """What the session's sampling parameters need to know of its text; raises `InvalidRequest`."""
        opening = session.opening
        if not opening.params.shaped:
            return None
        if self._new_state is None:
            raise InvalidRequest(f"tier {self.name} honours temperature and the filters of likely tokens alone")
        return self._new_state(opening, session.text)

    def _obey(self, slot: Slot, message: Commit | Close) -> None:
        """A message from above."""
        if isinstance(message, Close):
            self._leave(slot)
            return
        try:
            stalled = slot.session.stalled
            change = slot.session.commit(message.start, message.tokens)
        except ProtocolError as error:
            self._fail(slot, str(error))
            return
        if change is not None:
            self._drafters.tell(slot, change)
        if change is not None or stalled:
            slot.since = time.monotonic()

    def _hear(self, message: Proposal | Failed) -> None:
        """A message from below."""
        lost = self._drafters.hear(message, time.monotonic())
        if lost is not None:
            log.info("Tier %s goes on without %s: %s", self.name, *lost)
        elif (slot := self._drafters.slot(message.session)) is not None and slot.session.opening.watch:
            self._untold[message.session] = slot

    def _send_down(self, tier: str, message: Message) -> None:
        assert self.below is not None, f"tier {self.name} has nobody below, not {tier}"
        self._out[self.below].append(message)

    def _leave(self, slot: Slot, *, spoilt: bool = False) -> None:
        """Free everything the session occupies, here and below; what it leaves is not reused if it may be ``spoilt``."""
        self._untold.pop(slot.session.drafter_session, None)
        self._drafters.leave(slot)
        del self._slots[slot.session.opening.session]
        self.kv_admission.leave(slot, spoilt=spoilt)

    def _fail(self, slot: Slot, reason: str, *, fault: bool = False) -> None:
        self._leave(slot, spoilt=True)
        self._out[slot.up].append(Failed(slot.session.opening.session, reason, self.name, fault))

    def _up(self, slot: Slot, proposal: Proposal | None) -> None:
        if proposal is not None:
            if slot.state is not None and slot.session.opening.params.logprobs is not None:
                proposal = replace(proposal, logprobs=slot.state.logprobs(proposal.start, len(proposal.tokens)))
            if slot.state is not None and proposal.start == slot.state.prompt_len:
                proposal = replace(proposal, prompt_logprobs=slot.state.prompt_logprobs)
            self._out[slot.up].append(proposal)

    def snapshot(self) -> TierStats:
        """A copy of the totals."""
        return replace(self.stats, reused=self.kv_admission.block_manager.reused, preempted=self.kv_admission.preempted)


def _earlier(first: float | None, second: float | None) -> float | None:
    times: Iterable[float] = (t for t in (first, second) if t is not None)
    return min(times, default=None)
