"""This project against Transformers, vLLM and llama.cpp on the same weights, prompts and threads, in one run.

    make bench-peers

Every engine is a process of its own; vLLM and llama.cpp have environments of their own. Parts: ``one`` request at a time, all
modes in turns, all others stopped meanwhile; ``served``: requests over HTTP with ``vllm bench serve`` as the client. A part
that is not run keeps what an earlier run of the same family on the same processor measured. A peer that cannot be had or fails
is ``null``, and named in the document. The last line is JSON; the whole document is kept in ``benchmarks/results/peers.json``.
"""

import argparse
import hashlib
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import RESULTS, console, dated, keep, parsed, parser, stamp
from benchmarks.peers import contest, report, served
from benchmarks.peers.contract import Models, num_threads
from benchmarks.turns import at
from cascade import family
from cascade.agreement import chat_ids
from cascade.engine.tokenizer import Tokenizer
from cascade.prompts import BUILT_IN, Prompt

PARTS = ("one", "served")
LAST_LINE = ("family", *PARTS)
PROMPTS, TOKENS = 6, 48  # of one request at a time, kinds in turn; of an answer at most
TEMPERATURES = (0.0, 0.7, 1.0)  # of one request
SERVED_TEMPERATURE = 0.7  # of requests over HTTP
AT_ONCE = {1: 12, 8: 48, 32: 192, 64: 384}  # requests in all, so that most of a round is as many at once
SERVED_S = 600.0  # that the served part is given of the minutes
HEADLINE = ("alone", "auto", "best", "vllm_alone", "vllm_best", "llama_alone", "llama_best", "generate")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("peers", "This project against other engines.", PARTS)
    made.add_argument("--minutes", type=float, default=20, help="after which fewer prompts are asked (%(default)g)")
    chosen = parsed(made, arguments)
    chosen.prompts, chosen.tokens = (2, 8) if chosen.quick else (PROMPTS, TOKENS)
    name = contest.WORK / "peers-quick.json" if chosen.quick else RESULTS / "peers.json"  # each part is kept
    chosen.results, chosen.only = chosen.results or name, chosen.only or PARTS
    return chosen


def identity(models: Models) -> dict[str, str]:
    """Which weights these are: the beginning of the SHA-256 of each model's files of weights."""

    def weights(folder: str) -> str:
        digest = hashlib.sha256()
        for path in sorted(Path(folder).glob("*.safetensors")):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:12]

    return {name: weights(folder) for name, folder in asdict(models).items()}


def in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first of each kind, then the second of each."""
    places: dict[str, int] = {}
    keys = []
    for index, prompt in enumerate(prompts):
        places[prompt.category] = places.get(prompt.category, -1) + 1
        keys.append((places[prompt.category], index))
    return [prompts[index] for _, index in sorted(keys)]


def blank(models: Models) -> dict[str, Any]:
    """A document of which nothing is measured."""
    return {
        **stamp(identity(models)),
        "one": {at(temperature): dict.fromkeys(HEADLINE) for temperature in TEMPERATURES},
        "served": {str(at_once): dict.fromkeys(("alone", "auto", "vllm")) for at_once in AT_ONCE},
        "threads": num_threads(),
        "versions": {},
        "missing": {},
        "how": {},
        "cells": {"one": {}, "served": {}},
    }


def begun(path: Path, models: Models) -> dict[str, Any]:
    """What an earlier run said of this family on this processor, else a blank document."""
    document = blank(models)
    same = ("family", "processor", "threads")
    if path.exists():
        earlier: dict[str, Any] = json.loads(path.read_text())
        if all(earlier.get(key) == document[key] for key in same):
            return {**document, **earlier, "date": document["date"]}
    return document


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: models, prompts, and the tokens that end an answer."""

    models: Models
    prompts: Sequence[Prompt]
    ids: Sequence[Sequence[int]]  # of each prompt
    ends: Sequence[int]

    @classmethod
    def of(cls, models: Models) -> "Subject":
        tokenizer, prompts = Tokenizer.from_pretrained(models.full), in_turn(BUILT_IN)
        return cls(models, prompts, [chat_ids(tokenizer, prompt.text) for prompt in prompts], sorted(tokenizer.end_ids))


def single(document: dict[str, Any], chosen: argparse.Namespace, subject: Subject, end: float) -> bool:
    """Fill in what one request at a time gives until ``end``; whether all texts of this project are the same."""
    ids = subject.ids[: chosen.prompts]
    same: list[bool] = []

    def tell(name: str, turns: report.Turns) -> None:
        cells = report.cells(turns, compared=name == "t0")
        document["cells"]["one"][name], document["one"][name] = cells, report.headline(cells)
        num_prompts = max(map(len, turns.values()), default=0)
        document["how"].setdefault("one", {})[name] = {"prompts": num_prompts, "tokens": chosen.tokens}
        same.append(report.lossless(turns))
        console.print(report.table(f"One request, {name}", cells))
        keep(document, chosen.results)

    with ExitStack() as stack:
        workers = contest.Crew()
        workers.hire(contest.POSTS, subject.models, subject.ends, stack)
        plan = contest.Plan(ids, chosen.tokens, TEMPERATURES, end - time.monotonic())
        contest.measure(workers, plan, tell)
    wanted = {mode for post in contest.POSTS for mode in post.modes}
    document["missing"] = {mode: why for mode, why in document["missing"].items() if mode not in wanted} | workers.missing
    document["versions"] |= workers.versions
    return all(same)


def serve(document: dict[str, Any], chosen: argparse.Namespace, subject: Subject) -> None:
    """Fill in what requests over HTTP give."""
    drafters = [report.best_drafter(cells, "vllm") for cells in document["cells"]["one"].values()]
    drafter = next((mode for mode in drafters if mode), "vllm_ngram")
    requests = {at_once: min(2, number) if chosen.quick else number for at_once, number in AT_ONCE.items()}
    plan = served.Plan(subject.prompts, chosen.tokens, SERVED_TEMPERATURE, requests, drafter)

    def tell(at_once: int, cells: Mapping[str, Any]) -> None:
        document["cells"]["served"][str(at_once)], document["served"][str(at_once)] = dict(cells), served.headline(cells)
        console.print(f"served, {at_once} at once: {json.dumps(cells)}")
        keep(document, chosen.results)

    with ExitStack() as stack:
        arena = served.Arena(subject.models, plan, stack)
        served.measure(arena, plan, tell)
    kept = {mode: why for mode, why in document["missing"].items() if not mode.startswith("served ")}
    document["missing"] = kept | {f"served {mode}": why for mode, why in arena.missing.items()}
    about = {"temperature": plan.temperature, "tokens": plan.tokens, "requests": requests, "vllm_drafter": drafter}
    document["how"]["served"] = about
    document |= dated(document, ["served"])


def main(arguments: Sequence[str] | None = None) -> None:
    chosen, begin = options(arguments), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench-peers was told to end"))  # and ends what it has started
    contest.WORK.mkdir(exist_ok=True)
    tiny, medium, full = family.paths()
    models = Models(full, tiny, medium)
    subject, document, same = Subject.of(models), begun(chosen.results, models), True
    if "one" in chosen.only:
        left = SERVED_S if "served" in chosen.only else 0.0
        same = single(document, chosen, subject, begin + 60 * chosen.minutes - left)
    if "served" in chosen.only:
        serve(document, chosen, subject)
    keep(document, chosen.results)
    print(json.dumps({key: document[key] for key in LAST_LINE}))
    if not same:
        raise SystemExit("The cascade's text is not that of its full model alone")


if __name__ == "__main__":
    main()
