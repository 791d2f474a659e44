"""Rules of acceptance beside each other on the embedded family, in the library: tokens per full pass, and tokens per second.

    make bench-rules

Every mode answers the built-in prompts at three temperatures with several seeds, one request at a time. In rounds tokens per
full pass do not depend on how fast the machine is; where tiers do not wait for each other they do. Beside it: what the
distribution of a guess weighs on the wire. The last line is one JSON document.
"""

import argparse
import asyncio
import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.baseline import quiet
from benchmarks.trees.cells import at
from cascade import family
from cascade.bench.load import Cell, Workload, joined, load
from cascade.bench.measure import Mode
from cascade.bench.prompts import BUILT_IN, Prompt
from cascade.chain.rounds import offered
from cascade.draft import Draft
from cascade.engine.acceptance import RULES, siblings
from cascade.engine.devices import processor
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer
from cascade.local import Cascade
from cascade.messages import RUNNER_UPS, Proposal
from cascade.params import DRAFT_TOP_K, LOCKSTEP_WINDOW, MOST_BRANCHES, WEIGHED, SamplingParams, Speculation
from cascade.scorer import Draw, Row, Sibling
from deployments.links.codec import encode

RESULTS = Path(__file__).parent / "results" / "rules.json"
TEMPERATURES = (0.3, 0.7, 1.0)
LOADS = (1,)  # requests at once
STRIDE = 6  # tokens between two lines
TOKENS, SEEDS = 96, 2  # of an answer; answers to a prompt
ALONE = Mode("alone", Speculation("off"))
CHAINS = {"medium": ("medium",), "tiny + medium": ("tiny", "medium")}
console = Console(stderr=True, highlight=False)


def modes(name: str, chain: tuple[str, ...]) -> list[Mode]:
    """Every rule with one choice of tiers."""
    most = MOST_BRANCHES
    return [
        Mode(f"coupled lines, lockstep, {name}", Speculation(tiers=chain, schedule="lockstep", branches=0)),
        Mode(f"coupled trees, lockstep, {name}", Speculation(tiers=chain, schedule="lockstep", branches=most)),
        Mode(f"ratio lines, {name}", Speculation(tiers=chain, rule="ratio", branches=0)),
        Mode(f"ratio trees, {name}", Speculation(tiers=chain, rule="ratio", branches=most)),
        Mode(f"ratio lines of all tokens, {name}", Speculation(tiers=chain, rule="ratio", branches=0, draft_top_k=0)),
        Mode(f"ratio trees of all tokens, {name}", Speculation(tiers=chain, rule="ratio", branches=most, draft_top_k=0)),
        Mode(f"block lines, {name}", Speculation(tiers=chain, rule="block")),
        Mode(f"block lines of all tokens, {name}", Speculation(tiers=chain, rule="block", draft_top_k=0)),
        Mode(f"coupled lines, async, {name}", Speculation(tiers=chain, branches=0)),
        Mode(f"coupled trees, async, {name}", Speculation(tiers=chain)),
    ]


MODES = (ALONE, *(mode for name, chain in CHAINS.items() for mode in modes(name, chain)))


def measure(quick: bool) -> dict[str, list[Cell]]:
    """One cell for each mode and number of requests at once, by temperature."""
    prompts, seeds = (BUILT_IN[:2], 1) if quick else (BUILT_IN, SEEDS)
    found: dict[str, list[Cell]] = {}
    with Cascade.demo(drafter=None) as cascade, Progress(console=console, transient=True) as progress:
        for temperature in TEMPERATURES[-1:] if quick else TEMPERATURES:
            params = SamplingParams(max_tokens=12 if quick else TOKENS, temperature=temperature, ignore_eos=True)
            work = [Workload(MODES, prompts, LOADS, replace(params, seed=seed)) for seed in range(seeds)]
            task = progress.add_task(f"Temperature {temperature:g}", total=sum(one.num_requests for one in work))
            cells = [
                cell
                for one in work
                for cell in asyncio.run(load(cascade.astream, one, lambda task=task: progress.advance(task)))  # type: ignore[misc]
            ]
            found[at(temperature)] = joined(cells)
    return found


def figures(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Of each mode."""
    found = {}
    for mode in MODES:
        own = [cell for cell in cells if cell.mode == mode]
        passes = sum(cell.edges.full_passes for cell in own)
        found[mode.name] = {
            "tokens_per_pass": round(sum(cell.tokens for cell in own) / max(1, passes), 3),
            "tokens_per_s": round(next(cell for cell in own if cell.concurrency == 1).tokens_per_second, 1),
        }
    return found


def tokens_per_round(temperature: float, prompts: Sequence[Prompt] = BUILT_IN, tokens: int = TOKENS) -> dict[str, float]:
    """Tokens that a round of medium's guesses gives, by formula: the mean over lines that are the same for all.

    Lines are drawn behind what the full model writes, every `STRIDE` tokens, and for trees siblings beside them. It depends on
    luck far less than answers do.
    """
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=True)
    with Cascade.from_pretrained(family.paths()[-1:], dtype="float32", drafter=None) as alone:
        written = [(alone.tokenizer.encode(one.text), alone.generate(one.text, params).token_ids) for one in prompts]
    texts = [[*prompt, *output[:end]] for prompt, output in written for end in range(0, tokens, STRIDE)]
    full, medium = (Model.from_pretrained(path, dtype="float32") for path in family.paths()[:0:-1])
    sums, number = dict.fromkeys((*WEIGHED, "ratio trees"), 0.0), random.Random(0)
    for text in texts:
        line, beside = drawn(medium, text, params, number)
        p = full.logits([Row(full.new_cache(), 0, text, 1, params, draft=line)]).float().div(temperature).softmax(-1)
        q, x = torch.stack([dist.probs for dist in line.dists]), torch.tensor(line.tokens)
        for rule in WEIGHED:
            sums[rule] += 1 + expected(rule, RULES[rule].weigh(p, q, x).chances.tolist())
        sums["ratio trees"] += 1 + expected_of_tree(siblings(p[:-1], q, families(line, beside)).chances.tolist())
    return {rule: round(total / len(texts), 3) for rule, total in sums.items()}


def drawn(
    model: Model, text: list[int], params: SamplingParams, number: random.Random
) -> tuple[Draft, list[Sequence[Sibling]]]:
    """A line behind ``text``, with what each guess was drawn from, and siblings beside it."""
    store, line = model.new_cache(), Draft()
    beside: list[Sequence[Sibling]] = []
    for size in range(LOCKSTEP_WINDOW):
        begin, new = (len(text) + size - 1, line.tokens[-1:]) if size else (0, text)
        draw = Draw([number.getrandbits(63)], "coupled", 0, RUNNER_UPS)
        [scored] = model.run([Row(store, begin, new, 1, params, draw=draw)])
        line = Draft((*line.tokens, *scored.own), bytes(size + 1), dists=(*line.dists, *scored.dists))
        beside += scored.siblings
    return line, beside


def families(line: Draft, beside: Sequence[Sequence[Sibling]]) -> torch.Tensor:
    """Each guess of ``line`` with the siblings that are offered beside it, -1 where there are fewer: int64 ``[n, k]``."""
    heads = sorted(offered(beside), reverse=True, key=lambda head: head[0])[:MOST_BRANCHES]
    found = torch.full((len(line), 1 + RUNNER_UPS), -1)
    found[:, 0] = torch.tensor(line.tokens)
    for _, place, rank in heads:
        found[place, 1 + rank] = beside[place][rank].token
    return found


def expected(rule: str, chances: Sequence[float]) -> float:
    """Accepted guesses on average, each of which passes with its chance: up to the first that does not, or to the last one."""
    if rule == "ratio":
        return sum(math.prod(chances[: place + 1]) for place in range(len(chances)))
    rest = [math.prod(1 - chance for chance in chances[place:]) for place in range(1, len(chances) + 1)]
    return sum(place * chance * none for place, (chance, none) in enumerate(zip(chances, rest, strict=True), start=1))


def expected_of_tree(chances: Sequence[Sequence[float]]) -> float:
    """Accepted guesses on average, where each place has a guess and siblings, each with its chance if those before it fail."""
    accepted, reach = 0.0, 1.0
    for first, *others in chances:
        accepted += reach * (1 - (1 - first) * math.prod(1 - chance for chance in others))
        reach *= first
    return accepted


def bytes_per_token(temperature: float, **shape: Any) -> dict[str, float]:
    """Bytes of a proposal of one round on the wire, by token: ids alone, with the likeliest tokens, and with all."""
    medium = family.paths()[1]
    model, tokenizer = Model.from_pretrained(medium, dtype="float32"), Tokenizer.from_pretrained(medium)
    params, found = SamplingParams(temperature=temperature, seed=0, **shape), {}
    for name, likeliest in (("coupled", None), (f"of {DRAFT_TOP_K} tokens", DRAFT_TOP_K), ("of all tokens", 0)):
        sizes = []
        for prompt in BUILT_IN:
            text = tokenizer.encode(prompt.text)
            n = min(LOCKSTEP_WINDOW, len(text))
            row = Row(model.new_cache(), 0, text, n, params, draw=Draw(range(n), "coupled", likeliest))
            [scored] = model.run([row])
            draft = Draft(tuple(scored.own), bytes(n), dists=tuple(scored.dists))
            sizes.append(encode([Proposal("0" * 32, len(text), draft)]).ByteSize() / n)
        found[name] = round(sum(sizes) / len(sizes), 1)
    return found


def head(found: dict[str, list[Cell]], quick: bool) -> dict[str, Any]:
    """All figures, and whether they are as the papers have them."""
    by_temperature = {name: figures(cells) for name, cells in found.items()}
    prompts, tokens = (BUILT_IN[:1], 2 * STRIDE) if quick else (BUILT_IN, TOKENS)
    return {
        "modes": by_temperature,
        "tokens_per_round": {at(temperature): tokens_per_round(temperature, prompts, tokens) for temperature in TEMPERATURES},
        "block_at_least_ratio": _at_least(by_temperature, "block lines", "ratio lines"),
        "trees_at_least_lines": _at_least(by_temperature, "ratio trees", "ratio lines"),
        "bytes_per_token": {
            at(temperature): bytes_per_token(temperature)
            | {"top_p 0.9, of all": bytes_per_token(temperature, top_p=0.9)["of all tokens"]}
            for temperature in TEMPERATURES
        },
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
    """Tokens per full pass, and per second with one request at a time."""
    made = Table("mode", *first["modes"], title="tokens per full pass / per second")
    for mode in MODES:
        cells = [each[mode.name] for each in first["modes"].values()]
        made.add_row(mode.name, *(f"{cell['tokens_per_pass']:.2f} / {cell['tokens_per_s']:.0f}" for cell in cells))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rules", description="Every rule of acceptance beside every other."
    )
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it works, not how fast")
    parser.add_argument("--results", type=Path, help="where the document is kept, if not benchmarks/results")
    chosen = parser.parse_args(arguments)
    quiet()
    first = head(measure(chosen.quick), chosen.quick) | {"hardware": f"{processor()}, {os.cpu_count()} cores"}
    console.print(table(first))
    if results := chosen.results or (None if chosen.quick else RESULTS):
        results.write_text(json.dumps(first, indent=1) + "\n")
    print(json.dumps(first))


if __name__ == "__main__":
    main()
