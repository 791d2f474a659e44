"""Drafters that follow the traffic: what a change of it costs the shipped ones, what they learn back, and swaps under load.

    make bench-align

Two parts. *Learning*: the full model answers chats in English, which its drafters were made for, and continues files in Java,
which they were not; then each drafter learns in rounds, as the learner of a server does, and held-out answers judge it.
*Swapping*: a server of the same models takes weights of before and after in turn while clients stream. Every text is compared
with the full model's. The last line is one JSON document.
"""

import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray import serve

from benchmarks.document import console, finish, parsed, parser, stamp, timed
from cascade import SamplingParams, Speculation, family
from cascade.agreement import chat_ids
from cascade.client import AsyncClient
from cascade.engine.devices import processor
from cascade.engine.generation import configured_ends
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer, pretrained
from cascade.prompts import BUILT_IN
from cascade.settings.config import CascadeConfig
from cascade.training.alignment import Outcome, Student, align, record, shards
from cascade.training.reservoir import Sample
from cascade.training.versions import Versions
from cascade.training.writing import Turns, given_prompts, write
from deployments.ops.launch import APPLICATION, Server

WAYS = ("Write a short text about {}.", "Explain {} to a child.", "Give me three facts about {}.", "Why is {} useful?")
THINGS = (
    "the sea,a bicycle,bread,the moon,music,a bridge,honey,the wind,paper,a garden,chess,winter,coffee,a library,rivers,glass,"
    "volcanoes,trains,sleep,maps,salt,clocks,birds,cotton,mountains,iron,rice,lighthouses,rain,friendship,the heart,painting"
)
NOUNS = (
    "Order,Customer,Invoice,Product,Account,Message,Student,Vehicle,Booking,Sensor,Payment,Ticket,Recipe,Player,Report,Device"
)
FIELDS = ("String name", "int count", "double price", "List<String> items", "Map<String, Integer> totals", "boolean active")
ROLES = ("", "Service", "Repository", "Controller", "Builder", "Test", "Factory", "Exception")
STUDENTS = ("medium", "tiny")  # in the order in which they learn: tiny's verifier is medium
CLIENTS = 2
SWAPPED = ("tiny", "medium")
SWAP_S = 90.0  # that a replica has to take new weights


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked and learnt."""

    answers: int = 64  # of each language
    tokens: int = 112  # of an answer with its prompt
    rounds: int = 3
    seconds: Mapping[str, float] = field(default_factory=lambda: {"medium": 330.0, "tiny": 150.0})
    swaps: int = 20
    quiet_s: float = 25.0  # of load without swaps, to compare with


QUICK = Size(64, 96, 1, dict.fromkeys(STUDENTS, 2.0), 4, 3.0)


def chats(tokenizer: Tokenizer) -> list[list[int]]:
    """What drafters were made for: questions in English, as a chat."""
    return [chat_ids(tokenizer, way.format(thing)) for thing in THINGS.split(",") for way in WAYS]


def code(tokenizer: Tokenizer) -> list[list[int]]:
    """What they were not: the beginnings of files in Java, to be continued."""
    kinds = [(noun + role, FIELDS[number % len(FIELDS)]) for role in ROLES for number, noun in enumerate(NOUNS.split(","))]
    beginnings = (f"package com.example.shop;\n\npublic class {name} {{\n\n    private {field};\n" for name, field in kinds)
    return [tokenizer.encode(text) for text in beginnings]


def answers(prompts: Callable[[Tokenizer], list[list[int]]], size: Size) -> list[Sample]:
    """What the full model answers, at temperatures 0, 0.7 and 1."""
    source = family.path("full")
    turns = Turns.of(pretrained(source), configured_ends(source))
    beginnings = islice(given_prompts(prompts(Tokenizer.from_pretrained(source))), size.answers)
    written = write(Model.from_pretrained(source), turns, beginnings, rows=size.answers, max_len=size.tokens)
    return [Sample(tuple(text.tokens), text.prompt_len, text.temperature, "", 1, time.time()) for text in written]


def agreement(student: Student, samples: Sequence[Sample]) -> float:
    """Share of held-out answers that a student says."""
    held_out = shards([sample for sample in samples if sample.held_out], student.tokens)
    return float(np.concatenate([student.agrees(shard) for shard in held_out]).mean())


def learn(size: Size, old: Sequence[Sample], new: Sequence[Sample], folder: Path) -> dict[str, Any]:
    """By drafter: its agreement before and after, and after each round."""
    figures: dict[str, Any] = {}
    for name in STUDENTS:
        verifier = folder / "medium" / "000001" if name == "tiny" else Path(family.path("full"))
        if name == "tiny":  # what the change has cost is judged by the verifier that it had then
            before = Student(family.path("medium"), family.path(name))
            cost = [agreement(before, samples) for samples in (old, new)]
        student = Student(str(verifier), family.path(name))
        rounds: list[Outcome] = []
        for _ in range(size.rounds):
            rounds.append(align(name, student, new, old, size.seconds[name] / size.rounds))
            console.print(f"{rounds[-1]}", markup=False)
        first, last = rounds[0], rounds[-1]
        cost = cost if name == "tiny" else [first.old_before or 0.0, first.before]
        Versions(folder / name).add(partial(record, student, last))
        times = accumulate((outcome.seconds for outcome in rounds), initial=0.0)
        points = [(first.before, first.old_before), *((outcome.after, outcome.old_after) for outcome in rounds)]
        course = [
            [round(time_s, 1), round(new, 3), round(old or 0.0, 3)] for time_s, (new, old) in zip(times, points, strict=True)
        ]
        figures[name] = {
            "old": {"before": cost[0], "after": last.old_after},
            "new": {"before": cost[1], "after": last.after},
            "recovered": (last.after - cost[1]) / (cost[0] - cost[1]) if cost[0] > cost[1] else None,
            "old_lost": 1 - (last.old_after or 0.0) / cost[0],
            "steps": sum(outcome.steps for outcome in rounds),
            "judged": last.judged,
            "course": course,
        }
    return figures


# swapping


@dataclass(slots=True)
class Load:
    """What clients saw."""

    gaps: list[float] = field(default_factory=list)  # between two pieces of a stream, seconds
    ended: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    faults: list[str] = field(default_factory=list)


def config(folder: Path) -> CascadeConfig:
    """The family, whose learner has nothing to learn here: the versions are there already."""
    values = CascadeConfig.demo().model_dump(mode="json")
    settings = {"folder": str(folder), "students": list(SWAPPED), "canary_s": 0.0, "min_rows": 10**9}
    return CascadeConfig.parse(values | {"alignment": settings | {"ray_actor_options": {"num_cpus": 0.5}}})


async def loaded(server: Server, expected: Mapping[int, str], over: asyncio.Event) -> Load:
    """Clients that stream one answer after another until it is ``over``."""
    load, turns = Load(), cycle(expected)

    async def client() -> None:
        async with AsyncClient(server.address, timeout=180.0) as connection:
            while not over.is_set():
                number = next(turns)
                text, last = "", None
                try:
                    async for piece in connection.stream(*ask(number), Speculation(tiers=SWAPPED)):
                        now = time.perf_counter()
                        if last is not None and piece.token_ids:
                            load.gaps.append(now - last)
                        last, text = now, text + piece.text
                        load.tokens += len(piece.token_ids)
                except Exception as error:  # of whatever kind: each is a failed answer
                    load.ended["failed"] += 1
                    load.faults.append(f"{type(error).__name__}: {error}"[:200])
                else:
                    load.ended["right" if text == expected[number] else "changed"] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return load


def ask(number: int) -> tuple[str, SamplingParams]:
    return BUILT_IN[number % len(BUILT_IN)].text, SamplingParams(
        max_tokens=48, temperature=0.7 * (number % 2), seed=number, ignore_eos=True
    )


async def alone(server: Server, count: int) -> dict[int, str]:
    """What the full model says alone."""
    async with AsyncClient(server.address, timeout=180.0) as connection:
        texts = await asyncio.gather(*(connection.generate(*ask(number), Speculation("off")) for number in range(count)))
    return {number: text.text for number, text in enumerate(texts)}


def swap(folder: Path, wanted: int, over: asyncio.Event, loop: asyncio.AbstractEventLoop) -> int:
    """Let tiers go from one version to the other so many times; returns how often all replicas took it in time."""
    done = 0
    try:
        for turn in range(wanted):
            name = SWAPPED[turn % len(SWAPPED)]
            versions = Versions(folder / name)
            chosen = versions.all[turn // len(SWAPPED) % 2]
            versions.choose(chosen)
            end = time.monotonic() + SWAP_S
            while time.monotonic() < end:
                states = serve.get_deployment_handle(name, APPLICATION).broadcast("weights").results(timeout_s=SWAP_S)
                if all(state.version == chosen.name for state in states):
                    done += 1
                    break
                time.sleep(0.2)
    finally:
        loop.call_soon_threadsafe(over.set)
    return done


def begin(folder: Path) -> None:
    """See that both tiers have two versions: what they have learnt, if they have, and what they began with."""
    for name in SWAPPED:
        while len(Versions(folder / name).all) < 2:
            Versions(folder / name).add(partial(copied, family.path(name)))


def copied(source: str, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


async def serve_and_swap(server: Server, folder: Path, size: Size) -> dict[str, Any]:
    """What clients see without swaps, and while tiers swap."""
    loop, expected = asyncio.get_running_loop(), await alone(server, 8)
    over = asyncio.Event()
    loop.call_later(size.quiet_s, over.set)
    calm = await loaded(server, expected, over)
    over = asyncio.Event()
    swapping = asyncio.create_task(asyncio.to_thread(swap, folder, size.swaps, over, loop))
    load = await loaded(server, expected, over)
    ended = calm.ended + load.ended
    return {
        "swaps": await swapping,
        "calm": {"p99_gap_s": round(p99(calm.gaps), 4), "tokens_per_second": round(calm.tokens / size.quiet_s, 1)},
        "p99_gap_s": round(p99(load.gaps), 4),
        "p99_gap_ratio": round(p99(load.gaps) / p99(calm.gaps), 3),
        "answers": dict(load.ended),
        "faults": [*calm.faults, *load.faults][:5],
        "failed": ended["failed"],
        "changed": ended["changed"],
        "same_text": not ended["changed"],
    }


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser("align", "Drafters that follow the traffic.", parts=("learning", "swapping"))
    chosen = parsed(made, arguments)
    size, parts = QUICK if chosen.quick else Size(), chosen.only or ("learning", "swapping")
    torch.set_num_threads(1)  # a spare core
    folder = Path(tempfile.mkdtemp(prefix="cascade-align-"))
    kept = json.loads(chosen.results.read_text()) if chosen.only and chosen.results and chosen.results.exists() else {}
    learnt: dict[str, Any] = kept.get("learning", {})  # a part that is not run stays as an earlier run has left it
    swapped: dict[str, Any] = kept.get("swapping", {})
    try:
        if "learning" in parts:
            old, new = (timed(f"answers to {kind.__name__}", partial(answers, kind, size)) for kind in (chats, code))
            learnt = learn(size, old, new, folder)
        if "swapping" in parts:
            begin(folder)
            with Server.start(config(folder), port=0, tell=console.print) as server:
                swapped = asyncio.run(serve_and_swap(server, folder, size)) | {
                    "date": stamp()["date"],
                    "processor": processor(),
                }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    line = {
        "recovered": {name: figures["recovered"] and round(figures["recovered"], 3) for name, figures in learnt.items()},
        "old_lost": round(max((figures["old_lost"] for figures in learnt.values()), default=0.0), 3),
        **{name: swapped.get(name) for name in ("p99_gap_ratio", "swaps", "failed", "changed")},
    }
    learnt_at = stamp() if "learning" in parts else {name: kept.get(name) for name in stamp()}
    finish({"head": line, "learning": learnt, "swapping": swapped} | learnt_at, line, chosen.results)


if __name__ == "__main__":
    main()
