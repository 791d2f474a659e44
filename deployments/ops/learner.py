"""The learner, a deployment that keeps answers, trains drafters on them, and gives new weights to the replicas.

The file `cascade.training.versions.CURRENT` of a drafter names the weights that serve. The learner and `cascade rollback` write
it. Replicas get these weights one by one, whichever weights they have, also after a replica or the learner dies.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from ray.serve.handle import DeploymentHandle

from cascade.engine.threads import apart
from cascade.errors import CascadeError
from cascade.settings.config import CascadeConfig
from cascade.training.reservoir import Sample
from deployments.links.replica_status import ask_all
from deployments.replica import starting

log = logging.getLogger(__name__)

POLL_S = 1.0  # seconds between two steps
SAVE_S = 60.0  # seconds between two writes of answers to disk
ASK_TIMEOUT_S = 10.0
RENEW_TIMEOUT_S = 300.0
LOWEST = 19  # niceness of the training thread, so that serving comes first

# a canary is judged by this many tokens; it fails by this many standard deviations and this fall of the share of right tokens
LEAST_JUDGED, SIGMAS, FALL = 400, 4.0, 0.03
PATIENCE = 5  # times `canary_s` after which a canary with too few tokens passes

Verdict: TypeAlias = Literal["wait", "good", "bad", "gone"]


class Weights(NamedTuple):
    """The weights of a replica, and how they are judged."""

    replica: str
    version: str  # "" for the original weights
    right: int  # own tokens of ended sessions that the tier above accepted
    wrong: int


@dataclass(slots=True)
class Canary:
    """A replica that tries new weights before the others."""

    version: str
    replica: str
    since: float
    before: Mapping[str, Weights]  # state of all replicas when the canary got the weights

    def verdict(self, states: Sequence[Weights], now: float, wait_s: float) -> Verdict:
        """Whether the canary is right less often than the others since then; without others, less often than itself before."""
        here = next((state for state in states if state.replica == self.replica), None)
        if here is None:
            return "gone"  # another replica becomes the canary
        if now < self.since + wait_s:
            return "wait"
        others = [state for state in states if state.replica != self.replica and state.version != self.version]
        itself = self.before.get(self.replica)
        new = _since(here, itself)
        counts = [_since(state, self.before.get(state.replica)) for state in others]
        if not others and itself is not None:
            counts = [(itself.right, itself.wrong)]
        old = sum(right for right, _ in counts), sum(wrong for _, wrong in counts)
        if min(sum(new), sum(old)) < LEAST_JUDGED:
            return "wait" if sum(new) and now < self.since + PATIENCE * wait_s else "good"
        share = (new[0] + old[0]) / (sum(new) + sum(old))
        deviation = (share * (1 - share) * (1 / sum(new) + 1 / sum(old))) ** 0.5
        fall = old[0] / sum(old) - new[0] / sum(new)
        return "bad" if fall > max(FALL, SIGMAS * deviation) else "good"


def _since(now: Weights, then: Weights | None) -> tuple[int, int]:
    return (now.right, now.wrong) if then is None else (now.right - then.right, now.wrong - then.wrong)


@dataclass(slots=True)
class Record:
    """Results of a student's rounds."""

    kept: int = 0
    dropped: int = 0  # rounds whose weights were dropped, after the round or by a canary
    before: float | None = None  # agreement on held-out answers in the last round
    after: float | None = None
    share: float = 0.0  # share of the running round that is done
    swaps: int = 0  # times that a replica got other weights


@dataclass(slots=True)
class Rollout:
    """Gives the latest weights of a student to the replicas of its tier, one after another."""

    student: str
    config: CascadeConfig
    tier: DeploymentHandle
    record: Record
    canary: Canary | None = None
    good: str = ""  # version that has passed its canary

    async def step(self) -> None:
        """Take the next step of the rollout; mostly there is none."""
        assert self.config.alignment is not None
        alignment = self.config.alignment
        states = await ask_all(self.tier, "weights", timeout_s=ASK_TIMEOUT_S)
        current = alignment.versions(self.student).current
        wanted = "" if current is None else current.name
        if self.canary is not None and self.canary.version != wanted:  # rolled back, or replaced by a newer version
            self.canary = None
        if self.canary is not None:
            verdict = self.canary.verdict(states, time.monotonic(), alignment.canary_s)
            if verdict == "wait":
                return
            if verdict == "bad":
                back = alignment.versions(self.student).rollback()
                self.record.dropped += 1
                log.warning("%s: weights %s are dropped, %s is right less often", self.student, wanted, self.canary.replica)
                wanted, current = "" if back is None else back.name, back
            elif verdict == "good":
                self.good = wanted
            self.canary = None
        behind = next((state for state in states if state.version != wanted), None)
        if behind is None:
            return
        if wanted != self.good and wanted >= max(state.version for state in states):  # older ones have served
            begun = next((state for state in states if state.version == wanted), None)  # begun by a learner that died
            replica = (begun or behind).replica
            self.canary = Canary(wanted, replica, time.monotonic(), {state.replica: state for state in states})
            if begun is not None:
                return
        source = self.config.beginning(self.student) if current is None else str(current)
        if any(await ask_all(self.tier, "renew", behind.replica, wanted, source, timeout_s=RENEW_TIMEOUT_S)):
            self.record.swaps += 1
            log.info("%s: %s continues with weights %s", self.student, behind.replica, wanted or "that it began with")
        else:
            self.canary = None


class Learner:
    """Trains drafters on answers that routers send. ``tiers`` are handles of all tiers, by name."""

    _started = False

    @starting()
    async def __init__(self, config: Mapping[str, Any], tiers: Mapping[str, DeploymentHandle]) -> None:  # type: ignore[misc]
        self._config = CascadeConfig.model_validate(config)
        assert self._config.alignment is not None
        self._alignment = self._config.alignment
        self._answers = self._alignment.reservoir()
        self._records = {name: Record() for name in self._config.students}
        rollouts = [Rollout(name, self._config, tiers[name], record) for name, record in self._records.items()]
        self._drifting: dict[str, set[str]] = {}  # by router: drafters whose acceptance has fallen
        self._urgent = False  # an alarm starts the next round at once
        self._learnt_at, self._learnt_rows, self._saved_at = time.monotonic(), self._answers.num_added, time.monotonic()
        self._forgotten, self._closed = threading.Event(), threading.Event()
        work = (self._learn, *(rollout.step for rollout in rollouts))
        self._tasks = [asyncio.create_task(self._again(step)) for step in work]
        self._started = True

    async def take(self, router: str, samples: Sequence[Sample], drifting: Sequence[str]) -> dict[str, Any]:
        """Take a router's answers, and its drafters whose acceptance has fallen; returns `progress`."""
        self._answers.add(samples)
        self._urgent |= not {*drifting} <= self._drifting.get(router, set())
        self._drifting[router] = {*drifting}
        return self.progress()

    def progress(self) -> dict[str, Any]:
        """The number of kept answers, and the `Record` of each student."""
        return {"answers": len(self._answers), "students": {name: asdict(record) for name, record in self._records.items()}}

    async def teach(self) -> None:
        """Start a round now, if there are enough answers."""
        self._urgent = True

    async def __del__(self) -> None:
        if not self._started:
            return
        self._closed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._answers.save()

    async def _again(self, work: Callable[[], Any]) -> None:
        while True:
            try:
                await work()
            except Exception:  # Ray or the disk failed, perhaps only for now
                log.exception("The learner goes on")
            await asyncio.sleep(POLL_S)

    async def _learn(self) -> None:
        """Drop answers that shall be forgotten, and run a round if one is due."""
        self._tidy()
        now, new = time.monotonic(), self._answers.num_added - self._learnt_rows
        if new < self._alignment.min_rows or not (self._urgent or now >= self._learnt_at + self._alignment.every_s):
            return
        self._urgent, self._learnt_rows = False, self._answers.num_added
        self._answers.save()
        for student in reversed(self._config.students):  # verifiers learn before their drafters
            while not await self._round(student):
                log.info("The round of %s starts again, without answers that were forgotten", student)
        self._learnt_at = time.monotonic()

    def _tidy(self) -> None:
        if self._answers.forget():
            self._forgotten.set()
        if time.monotonic() > self._saved_at + SAVE_S:
            self._answers.save()
            self._saved_at = time.monotonic()

    async def _round(self, student: str) -> bool:
        """Run a round in a thread of its own; False if answers had to be forgotten meanwhile."""
        self._forgotten.clear()
        train = partial(self._train, student, self._answers.newest, self._answers.older)

        def run() -> None:
            with contextlib.suppress(OSError, AttributeError):  # not possible on all systems
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
            train()

        training = asyncio.create_task(asyncio.to_thread(apart, run))
        while not training.done():
            await asyncio.wait([training], timeout=POLL_S)
            self._tidy()
        await training
        return not self._forgotten.is_set()

    def _train(self, student: str, newest: Sequence[Sample], older: Sequence[Sample]) -> None:
        """Train, judge, and publish weights that are no worse."""
        from cascade.training import alignment

        settings, record = self._alignment, self._records[student]

        def tell(progress: alignment.Progress) -> None:
            record.share = progress.share
            if self._forgotten.is_set() or self._closed.is_set():
                raise alignment.Stopped

        try:
            lesson = alignment.Lesson(
                student,
                *self._config.lesson(student),
                newest=newest,
                older=older,
                seconds=settings.round_s,
                folder=settings.versions(student).folder,
            )
            if settings.num_workers == 1:
                outcome = lesson.run(settings.device, tell)
            else:
                from deployments.ops.workers import train

                outcome = train(lesson, settings.num_workers, settings.ray_actor_options, tell)
        except alignment.Stopped:
            return
        except CascadeError as error:
            log.warning("%s learns nothing: %s", student, error)
            return
        finally:
            record.share = 0.0
        record.before, record.after = outcome.before, outcome.after
        record.kept += not outcome.problem
        record.dropped += bool(outcome.problem)
        log.log(logging.WARNING if outcome.problem else logging.INFO, "%s", outcome)
