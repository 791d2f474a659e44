"""A served cascade with clients for a long time: whether every answer is right and nothing grows, and what kills change.

    make soak                                            # half an hour
    python -m benchmarks.endurance --minutes 10 --kills  # a process of each kind in turn, again and again

The demonstration family with two full replicas and two routers. Each client streams, asks for whole answers, or leaves in
mid-answer; every text is held against what the full model writes alone. After the last answer no tier may have a session or a
lease left. The last line is one JSON document.
"""

import asyncio
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
from ray import serve

from benchmarks.document import console, finish, parsed, parser, stamp, titled
from cascade import Cascade, SamplingParams, Speculation
from cascade.client import AsyncClient
from cascade.prompts import BUILT_IN
from cascade.settings.config import CascadeConfig
from deployments.ops.launch import APPLICATION, Server

CLIENTS = 6
TOKENS = 96  # of an answer
TEMPERATURES = (0.0, 0.8)
CHAINS = (None, ("tiny", "medium"), ("tiny",))
KINDS = ("router", "tiny", "medium", "full", "controller")
WHOLE = {"router": 2, "tiny": 1, "medium": 1, "full": 2, "controller": 1}
CACHE_TOKENS = 8192  # of each replica
LEAVING = 0.15  # share of streams that are left in the middle
PAUSE_S = 5.0  # between a process that is back and the next kill
BACK_S = 120.0  # to come back
WINDOW_S = 60.0  # of which one line is shown
SETTLE_S = 60.0  # after the last answer, for what it holds
ANSWER_S = 180.0  # that a client gives an answer


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and what the full model answers alone."""

    prompt: str
    params: SamplingParams
    text: str


@dataclass(slots=True)
class Window:
    """What a minute gave."""

    token_s: list[float] = field(default_factory=list)  # of each answer
    mib: dict[str, float] = field(default_factory=dict)  # of a process of each kind, the mean at the end

    def row(self) -> dict[str, Any]:
        times = sorted(self.token_s) or [0.0]
        cuts = statistics.quantiles(times, n=20) if len(times) > 1 else times * 19
        return {
            "answers": len(self.token_s),
            "token_ms": {"p50": round(1e3 * cuts[9], 2), "p95": round(1e3 * cuts[18], 2)},
            "mib": {kind: round(size) for kind, size in self.mib.items()},
        }


@dataclass
class Course:
    """All that has happened so far."""

    windows: list[Window] = field(default_factory=lambda: [Window()])
    ended: Counter[str] = field(default_factory=Counter)  # answers by how they ended
    faults: list[str] = field(default_factory=list)
    kills: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # seconds until each was back


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser("endurance", "Clients for a long time.", quick=False)
    made.add_argument("--minutes", type=float, default=30.0, help="%(default)s unless given")
    made.add_argument("--clients", type=int, default=CLIENTS, help="at once (%(default)s)")
    made.add_argument("--kills", action="store_true", help="kill a process of each kind in turn")
    chosen = parsed(made, arguments)
    asks = list(expected())
    with Server.start(config(), port=0, tell=console.print) as server:
        course = asyncio.run(run(server, asks, 60 * chosen.minutes, chosen.clients, kills=chosen.kills))
        left = settled()
    result = report(course, left) | {"clients": chosen.clients} | stamp()
    finish(result, result, chosen.results)
    sys.exit(bool(course.faults or left))


def config() -> CascadeConfig:
    """The demonstration family with caches that are full within minutes: what grows later is a leak."""
    values = CascadeConfig.demo().model_dump(mode="json")
    for tier in values["tiers"]:
        tier["engine_kwargs"]["cache_tokens"] = CACHE_TOKENS
    values["tiers"][-1]["deployment_config"]["num_replicas"] = WHOLE["full"]
    values["router"]["deployment_config"]["num_replicas"] = WHOLE["router"]
    return CascadeConfig.parse(values)


def expected() -> Iterator[Ask]:
    """Each prompt at each temperature. They share passes, which changes no bits and takes a fraction of the time."""
    prompts = [prompt.text for prompt in BUILT_IN for _ in TEMPERATURES]
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=seed, ignore_eos=True)
        for seed, _ in enumerate(BUILT_IN)
        for temperature in TEMPERATURES
    ]
    with Cascade.demo() as reference:
        answers = reference.generate(prompts, params, Speculation("off"))
    yield from (Ask(prompt, given, answer.text) for prompt, given, answer in zip(prompts, params, answers, strict=True))


async def run(server: Server, asks: Sequence[Ask], seconds: float, num_clients: int, *, kills: bool) -> Course:
    """Let clients ask for so long; windows close meanwhile, and processes die."""
    course, end = Course(), time.monotonic() + seconds
    over = threading.Event()
    killer = asyncio.to_thread(kill, course, over) if kills else asyncio.sleep(0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(killer)
        clients = [tasks.create_task(client(server, asks, course, end, number)) for number in range(num_clients)]
        while time.monotonic() < end:
            await asyncio.sleep(min(WINDOW_S, max(0.0, end - time.monotonic())))
            close(course)
        await asyncio.wait(clients)
        close(course)
        over.set()
    return course


async def client(server: Server, asks: Sequence[Ask], course: Course, end: float, number: int) -> None:
    """Ask one thing after another."""
    chance = random.Random(number)
    async with AsyncClient([server.address, server.address], timeout=ANSWER_S) as connection:
        while time.monotonic() < end:
            ask, begin = chance.choice(asks), time.monotonic()
            speculation = Speculation(tiers=chance.choice(CHAINS))
            try:
                text, how = await answered(connection, ask, speculation, chance)
            except Exception as error:  # of whatever kind: each is a failed answer
                course.ended["failed"] += 1
                course.faults.append(f"{type(error).__name__}: {error}"[:300])
                continue
            right = ask.text.startswith(text) if how == "left" else text == ask.text
            course.ended[how if right else "changed"] += 1
            if not right:
                course.faults.append(f"another text: {ask.params}")
            if how != "left":
                course.windows[-1].token_s.append((time.monotonic() - begin) / TOKENS)


async def answered(connection: AsyncClient, ask: Ask, speculation: Speculation, chance: random.Random) -> tuple[str, str]:
    """The text, and how it came."""
    if chance.random() < 0.5:
        return (await connection.generate(ask.prompt, ask.params, speculation)).text, "whole"
    leave = chance.random() < LEAVING
    text = ""
    async with aclosing(connection.stream(ask.prompt, ask.params, speculation)) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            text += piece.text
            if leave and len(text) > len(ask.text) / 2:
                return text, "left"
    return text, "streamed"


def close(course: Course) -> None:
    """End a window."""
    window = course.windows[-1]
    for kind, pids in processes().items():
        sizes = []
        for pid in pids:
            with suppress(psutil.Error):  # it has died
                sizes.append(psutil.Process(pid).memory_info().rss / 2**20)
        if sizes:
            window.mib[kind] = statistics.mean(sizes)
    console.print(f"{len(course.windows):>3} {json.dumps(window.row())} {dict(course.ended)}")
    course.windows.append(Window())


def processes() -> dict[str, list[int]]:
    """Those of each kind that are there."""
    replicas = {kind: titled(f"ray::ServeReplica:{APPLICATION}:{kind}") for kind in KINDS[:-1]}
    return {**replicas, "controller": titled("ray::ServeController")}


def kill(course: Course, over: threading.Event) -> None:
    """A process of each kind in turn, each when all that were killed are back."""
    chance, turn = random.Random(0), 0
    while not over.wait(PAUSE_S):
        kind, there = KINDS[turn % len(KINDS)], processes()
        turn += 1
        victim = chance.choice(there[kind])
        os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        while not whole(victim) and not over.wait(0.5):
            if time.monotonic() - begin > BACK_S:
                course.faults.append(f"{kind} did not come back within {BACK_S:g} s")
                return
        course.kills[kind].append(round(time.monotonic() - begin, 1))


def whole(dead: int) -> bool:
    """Whether all processes are there and serve, without one that was killed."""
    there = processes()
    if any(dead in pids or len(pids) < WHOLE[kind] for kind, pids in there.items()):
        return False
    with suppress(Exception):  # the controller may be the one that is away
        deployments = serve.status().applications[APPLICATION].deployments
        return all(deployments[name].replica_states.get("RUNNING", 0) >= WHOLE[name] for name in KINDS[:-1])
    return False


def settled() -> list[str]:
    """What tiers still hold when there was time enough to let go of it."""
    end = time.monotonic() + SETTLE_S
    while (left := list(held())) and time.monotonic() < end:
        time.sleep(1.0)
    return left


def held() -> Iterator[str]:
    for tier in ("tiny", "medium", "full"):
        handle = serve.get_deployment_handle(tier, APPLICATION)
        calls = [handle.describe.remote() for _ in range(16)]
        states = {state["pid"]: state for state in (call.result(timeout_s=SETTLE_S) for call in calls)}
        for state in states.values():
            if counts := {name: state[name] for name in ("sessions", "leases", "drafting") if state[name]}:
                yield f"{tier}: {counts}"


def report(course: Course, left: Sequence[str]) -> dict[str, Any]:
    """All of it, and the last third beside the first, of whole windows: the last two hold what ended after the time."""
    windows = [window for window in course.windows[:-2] if window.token_s]
    third = max(1, len(windows) // 3)
    ends: list[Window] = []  # times of all answers of a third, and memory at its end
    for some in (windows[:third], windows[-third:]) if windows else ():
        ends.append(Window([seconds for window in some for seconds in window.token_s], some[-1].mib))
    first, last = ends or (Window(), Window())
    grown = {kind: round(last.mib[kind] / first.mib[kind], 3) for kind in first.mib.keys() & last.mib.keys()}
    return {
        "answers": dict(course.ended),
        "faults": course.faults[:20],
        "left": list(left),
        "kills": {kind: {"count": len(times), "back_s": times} for kind, times in course.kills.items()},
        "first": first.row(),
        "last": last.row(),
        "memory_last_over_first": grown,
    }


if __name__ == "__main__":
    main()
