"""Rules of acceptance beside each other on the family, in the library: tokens per full pass, and tokens per second.

    make bench-rules

Every mode answers built-in prompts at two temperatures, one request at a time. In rounds tokens per full pass do not depend on
how fast the machine is; where tiers do not wait for each other they do. Beside it: what a round gives by formula, along lines
that are the same for all rules, and what the distribution of a guess weighs on the wire. The last line is one JSON document.
"""

import argparse
import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.asked import stamp
from benchmarks.baseline import quiet
from benchmarks.turns import AGAIN, ALONE, Answers, Question, at, in_turns, questions
from cascade import family
from cascade.answer import Completion
from cascade.bench.measure import Mode
from cascade.draft import Draft
from cascade.engine.acceptance import RULES
from cascade.engine.model import Model
from cascade.local import Cascade
from cascade.messages import Proposal
from cascade.params import DRAFT_TOP_K, LOCKSTEP_WINDOW, Handling, SamplingParams, Speculation
from cascade.scorer import Draw, Row, Store
from deployments.links.codec import encode

RESULTS = Path(__file__).parent / "results" / "rules.json"
TEMPERATURES = (0.7, 1.0)
STRIDE = 6  # tokens between two lines
CHAINS = {name: (name,) for name in family.NAMES[:-1]}
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    prompts: int = 1  # of each category
    tokens: int = 64  # of an answer
    temperatures: tuple[float, ...] = TEMPERATURES


QUICK = Size(tokens=2 * STRIDE, temperatures=TEMPERATURES[-1:])


def modes(name: str, chain: tuple[str, ...]) -> list[Mode]:
    """Every rule with one choice of tiers."""
    return [
        Mode(f"coupled lines, lockstep, {name}", Speculation(tiers=chain, schedule="lockstep", branches=0)),
        Mode(f"ratio lines, {name}", Speculation(tiers=chain, rule="ratio", branches=0)),
        Mode(f"block lines, {name}", Speculation(tiers=chain, rule="block")),
        Mode(f"coupled lines, async, {name}", Speculation(tiers=chain, branches=0)),
        Mode(f"coupled trees, async, {name}", Speculation(tiers=chain)),
    ]


MODES = (ALONE, AGAIN, *(mode for name, chain in CHAINS.items() for mode in modes(name, chain)))


def measure(asked: Sequence[Question], size: Size) -> dict[str, dict[str, Answers]]:
    """What each mode gave, by temperature."""
    found: dict[str, dict[str, Answers]] = {}
    with Cascade.demo(drafter=None) as cascade:

        async def ask(ids: list[int], params: SamplingParams, speculation: Speculation, handling: Handling) -> Completion:
            completion = await cascade.agenerate(ids, params, speculation, handling)
            assert isinstance(completion, Completion)
            return completion

        for temperature in size.temperatures:
            params = SamplingParams(max_tokens=size.tokens, temperature=temperature)
            found[at(temperature)] = asyncio.run(in_turns(ask, MODES, asked, params, console.print))
    return found


def figures(answers: Answers) -> dict[str, float]:
    """Of a mode."""
    return {"tokens_per_pass": round(answers.tokens_per_pass(), 3), "tokens_per_s": round(answers.speed(), 1)}


def tokens_per_round(temperature: float, asked: Sequence[Question], tokens: int) -> dict[str, float]:
    """Tokens that a round of medium's guesses gives, by formula: the mean over lines that are the same for all.

    Lines are drawn after what the full model writes, every `STRIDE` tokens. It depends on luck far less than answers do.
    """
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1)
    with Cascade.from_pretrained(family.paths()[-1:], dtype="float32", drafter=None) as alone:
        written = [(one.ids, alone.generate(one.ids, params).token_ids) for one in asked]
    full, medium = (Model.from_pretrained(path, dtype="float32") for path in family.paths()[:0:-1])
    sums, number, lines = dict.fromkeys(RULES, 0.0), random.Random(0), 0
    for prompt, output in written:
        stores, known = (full.new_cache(), medium.new_cache()), 0
        for end in range(0, len(output), STRIDE):
            text, lines = [*prompt, *output[:end]], lines + 1
            line = drawn(medium, stores[1], text, known, params, number)
            row = Row(stores[0], known, text[known:], 1, params, draft=line)
            p, known = full.logits([row]).float().div(temperature).softmax(-1), len(text)
            q, x = torch.stack([dist.probs for dist in line.dists]), torch.tensor(line.tokens)
            for rule, verdict in RULES.items():
                sums[rule] += 1 + expected(rule, verdict.weigh(p, q, x).chances.tolist())
    return {rule: round(total / lines, 3) for rule, total in sums.items()}


def drawn(model: Model, store: Store, text: list[int], known: int, params: SamplingParams, number: random.Random) -> Draft:
    """A line after ``text``, of which ``store`` holds the first ``known`` tokens, with what each guess was drawn from."""
    line = Draft()
    for size in range(LOCKSTEP_WINDOW):
        begin, new = (len(text) + size - 1, line.tokens[-1:]) if size else (known, text[known:])
        draw = Draw([number.getrandbits(63)], "coupled", 0)
        [scored] = model.run([Row(store, begin, new, 1, params, draw=draw)])
        line = Draft((*line.tokens, *scored.own), bytes(size + 1), dists=(*line.dists, *scored.dists))
    return line


def expected(rule: str, chances: Sequence[float]) -> float:
    """Accepted guesses on average, each of which passes with its chance: up to the first that does not, or to the last one."""
    if rule == "ratio":
        return sum(math.prod(chances[: place + 1]) for place in range(len(chances)))
    rest = [math.prod(1 - chance for chance in chances[place:]) for place in range(1, len(chances) + 1)]
    return sum(place * chance * none for place, (chance, none) in enumerate(zip(chances, rest, strict=True), start=1))


def bytes_per_token(temperature: float, asked: Sequence[Question], **shape: Any) -> dict[str, float]:
    """Bytes of a proposal of one round on the wire, by token: ids alone, with the likeliest tokens, and with all."""
    model = Model.from_pretrained(family.paths()[1], dtype="float32")
    params, found = SamplingParams(temperature=temperature, seed=0, **shape), {}
    for name, likeliest in (("coupled", None), (f"of {DRAFT_TOP_K} tokens", DRAFT_TOP_K), ("of all tokens", 0)):
        sizes = []
        for one in asked:
            n = min(LOCKSTEP_WINDOW, len(one.ids))
            row = Row(model.new_cache(), 0, one.ids, n, params, draw=Draw(range(n), "coupled", likeliest))
            [scored] = model.run([row])
            draft = Draft(tuple(scored.own), bytes(n), dists=tuple(scored.dists))
            sizes.append(encode([Proposal("0" * 32, len(one.ids), draft)]).ByteSize() / n)
        found[name] = round(sum(sizes) / len(sizes), 1)
    return found


def head(found: dict[str, dict[str, Answers]], asked: Sequence[Question], size: Size) -> dict[str, Any]:
    """All figures, and in how many cells the block rule gives as many tokens as the ratio rule, as it should."""
    by_temperature = {name: {mode: figures(one) for mode, one in answers.items()} for name, answers in found.items()}
    wire = {at(temperature): bytes_per_token(temperature, asked) for temperature in size.temperatures}
    for temperature in size.temperatures:
        narrow = bytes_per_token(temperature, asked, top_p=0.9)["of all tokens"]
        wire[at(temperature)]["top_p 0.9, of all"] = narrow
    return {
        "modes": by_temperature,
        "tokens_per_round": {at(one): tokens_per_round(one, asked, size.tokens) for one in size.temperatures},
        "block_at_least_ratio": _at_least(by_temperature, "block lines", "ratio lines"),
        "bytes_per_token": wire,
    }


def _at_least(by_temperature: dict[str, dict[str, dict[str, float]]], one: str, other: str) -> str:
    """In how many cells modes named ``one`` give at least as many tokens per pass as the ``other`` ones beside them."""
    pairs = [(mode.name, mode.name.replace(one, other)) for mode in MODES if mode.name.startswith(one)]
    more = [
        each[name]["tokens_per_pass"] >= each[beside]["tokens_per_pass"]
        for each in by_temperature.values()
        for name, beside in pairs
    ]
    return f"{sum(more)} of {len(more)} cells"


def table(first: dict[str, Any]) -> Table:
    """Tokens per full pass, and per second."""
    made = Table("mode", *first["modes"], title="tokens per full pass / per second")
    for mode in MODES:
        cells = [each[mode.name] for each in first["modes"].values()]
        made.add_row(mode.name, *(f"{cell['tokens_per_pass']:.2f} / {cell['tokens_per_s']:.1f}" for cell in cells))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rules", description="Every rule of acceptance beside every other."
    )
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it works, not how fast")
    parser.add_argument("--results", type=Path, help="where the document is kept, if not benchmarks/results")
    chosen = parser.parse_args(arguments)
    quiet()
    size = QUICK if chosen.quick else Size()
    asked = questions(size.prompts)
    first = head(measure(asked, size), asked, size) | stamp()
    console.print(table(first))
    if results := chosen.results or (None if chosen.quick else RESULTS):
        results.parent.mkdir(exist_ok=True)
        results.write_text(json.dumps(first, indent=1) + "\n")
    print(json.dumps(first))


if __name__ == "__main__":
    main()
