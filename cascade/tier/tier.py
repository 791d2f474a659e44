"""A tier: one model, many sessions, one loop in a thread with four verbs: schedule, launch, settle, collect and advance.

Prefill chunks, verification of guesses and plain decoding are the same here: "score these tokens from this position". While the
model works, the loop settles what the pass before has decided: it sends proposals and commits, counts and learns.
The loop never waits for a link: neither `Tier.post`, which takes messages, nor `Link.send` blocks.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

from cascade.messages import Failed, Link, Message, Open
from cascade.planner.chains import Planner
from cascade.planner.choice import Policy
from cascade.planner.cost import Profile
from cascade.scorer import Drafter, Scorer
from cascade.tier.kv_admission import KVAdmission
from cascade.tier.loop import Limits, Loop, NewState
from cascade.tier.runner import Runner

log = logging.getLogger(__name__)

JOIN_S = 0.5  # between two checks whether a loop has ended


class Tier:
    """Serves sessions of ``model`` as the tier ``name``, ``level`` tiers above the bottom one.

    - ``cache_tokens``: positions of keys and values at most, by default as many as there is memory for.
    - ``profile``: what passes cost; kept current.
    - ``new_state``: makes the state that some sampling parameters need; without it requests with such parameters fail.
    - ``planner`` chooses the tiers below that draft; ``drafters`` guess inside this tier.
    """

    def __init__(
        self,
        name: str,
        level: int,
        model: Scorer,
        *,
        policy: Policy = Policy(),
        planner: Planner | None = None,
        max_pass_tokens: int = 512,
        cache_tokens: int | None = None,
        profile: Profile | None = None,
        new_state: NewState | None = None,
        drafters: Sequence[Drafter] = (),
    ) -> None:
        self.name = name
        self.level = level
        self.below: Link | None = None  # to the tiers below: an Open names its tier; replies come through `post`
        self.planner = planner or Planner()
        self.kv_admission = KVAdmission(model.new_cache, cache_tokens or model.cache_tokens)
        profile = profile or Profile()
        self._runner = Runner(name, model, max_pass_tokens, profile)
        self.stats = self._runner.stats
        self._loop: Loop[Link] = Loop(
            name,
            level,
            Limits(model.vocab_size, model.context_len, policy, new_state),
            self.kv_admission,
            profile,
            send_up=lambda link, message: self._out[link].append(message),
            send_down=self._send_down,
            planner=self.planner,
            drafters=drafters,
        )
        self._inbox: queue.SimpleQueue[tuple[Sequence[Message], Link | None] | Link | None] = queue.SimpleQueue()
        self._out: dict[Link, list[Message]] = defaultdict(list)
        self._thread = threading.Thread(target=self._serve, name=f"tier-{name}", daemon=True)
        self._stopped = False

    # from any thread

    def start(self) -> None:
        self._thread.start()

    def post(self, messages: Sequence[Message], up: Link | None = None) -> None:
        """Hand over messages; with Opens comes the link that takes their sessions' proposals."""
        self._inbox.put((messages, up))
        if self._stopped:
            self._refuse()

    def drop(self, up: Link) -> None:
        """The link ``up`` is broken: close all its sessions."""
        self._inbox.put(up)

    def close(self) -> None:
        """Stop, close all sessions here and below, free everything. Sessions opened later fail. A loop that hangs is left."""
        self._inbox.put(None)
        if self._thread is threading.current_thread():
            return
        while self._thread.is_alive() and not self.hangs:
            self._thread.join(JOIN_S)

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and self._runner.healthy and not self.hangs

    @property
    def hangs(self) -> bool:
        """Whether the loop has been in one step, such as a pass, for far longer than expected."""
        return self._runner.watchdog.hangs

    @property
    def num_sessions(self) -> int:
        return len(self._loop.slots)

    @property
    def verdicts(self) -> tuple[int, int]:
        """Own tokens of ended sessions: how many the tier above accepted, and how many it corrected."""
        return self._loop.agreed, self._loop.corrected

    # the loop

    def _serve(self) -> None:
        loop, runner, watchdog = self._loop, self._runner, self._runner.watchdog
        loop.has_below = self.below is not None
        try:
            wake_at: float | None = None
            while self._receive(wake_at):
                watchdog.begin()
                batch, wake_at = loop.schedule(runner.max_tokens, time.monotonic())
                flight = runner.launch(batch) if batch else None
                loop.settle(time.monotonic())
                self._flush()
                if flight is not None:
                    results = runner.collect(flight)
                    watchdog.begin()
                    loop.advance(batch, results, time.monotonic())
                    wake_at = 0.0
                else:
                    runner.rest()
                watchdog.rest()
        finally:
            watchdog.rest()
            loop.fail_all(f"tier {self.name} stopped")
            self.kv_admission.block_manager.clear()
            self._flush()
            self._stopped = True
            self._refuse()

    def _receive(self, wake_at: float | None) -> bool:
        """Handle all messages, after waiting for one until ``wake_at`` (for ever if None); False if the tier shall stop."""
        try:
            item = self._inbox.get(timeout=None if wake_at is None else max(0.0, wake_at - time.monotonic()))
            while item is not None:
                if isinstance(item, tuple):
                    messages, up = item
                    for message in messages:
                        self._loop.receive(message, up, time.monotonic())
                else:
                    self._loop.drop(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _refuse(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, tuple) and (up := item[1]) is not None:
                    late = [m.session for m in item[0] if isinstance(m, Open)]
                    up.send([Failed(session, f"tier {self.name} stopped", self.name) for session in late])

    def _send_down(self, tier: str, message: Message) -> None:
        assert self.below is not None, f"tier {self.name} has no tier below, so not {tier}"
        self._out[self.below].append(message)

    def _flush(self) -> None:
        while self._out:
            link, messages = self._out.popitem()
            try:
                link.send(messages)
            except Exception:  # a broken link must not harm the sessions of others
                log.exception("A link of tier %s broke", self.name)
                self.drop(link)  # safe: no pass runs, so none has rows of its sessions
