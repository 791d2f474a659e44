"""Rules of acceptance beside each other on the family, in the library: tokens per full pass, and tokens per second.

    make bench-rules

Every mode answers built-in prompts at two temperatures, one request at a time. In rounds tokens per full pass do not depend on
how fast the machine is; where tiers do not wait for each other they do. Beside it: what a round gives by formula, along lines
that are the same for all rules, and what the distribution of a guess weighs on the wire. The last line is one JSON document.
"""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks.document import console, finish, parsed, parser, stamp
from benchmarks.prompts import chats
from benchmarks.turns import AGAIN, ALONE, Size, at, in_turns
from cascade import family
from cascade.bench.load import Mode, joined
from cascade.draft import Draft
from cascade.engine.model import Model
from cascade.engine.sampling.acceptance import RULES
from cascade.local import Cascade
from cascade.messages import Proposal
from cascade.params import DRAFT_TOP_K, LOCKSTEP_WINDOW, SamplingParams, Speculation
from cascade.scorer import Draw, Row, Store
from deployments.links.codec import encode

STRIDE = 6  # tokens between two lines
CHAINS = {name: (name,) for name in family.NAMES[:-1]}
SIZE, QUICK = Size(temperatures=(0.7, 1.0)), Size(tokens=2 * STRIDE, temperatures=(1.0,))


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


def measure(size: Size) -> dict[str, dict[str, dict[str, float]]]:
    """Tokens per full pass and per second, by temperature and mode."""
    found = {}
    with Cascade.demo(drafter=None) as cascade:
        for temperature in size.temperatures:
            cells = joined(asyncio.run(in_turns(cascade.astream, MODES, size, temperature)))
            found[at(temperature)] = {
                cell.mode.name: {
                    "tokens_per_pass": round(cell.tokens_per_full_pass, 3),
                    "tokens_per_s": round(cell.tokens_per_second, 1),
                }
                for cell in cells
            }
    return found


def tokens_per_round(temperature: float, asked: Sequence[list[int]], tokens: int) -> dict[str, float]:
    """Tokens that a round of medium's guesses gives, by formula: the mean over lines that are the same for all.

    Lines are drawn after what the full model writes, every `STRIDE` tokens. It depends on luck far less than answers do.
    """
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1)
    with Cascade.from_pretrained(family.paths()[-1:], dtype="float32", drafter=None) as alone:
        written = [(ids, alone.generate(ids, params).token_ids) for ids in asked]
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


def bytes_per_token(temperature: float, asked: Sequence[list[int]], **shape: Any) -> dict[str, float]:
    """Bytes of a proposal of one round on the wire, by token: ids alone, with the likeliest tokens, and with all."""
    model = Model.from_pretrained(family.paths()[1], dtype="float32")
    params, found = SamplingParams(temperature=temperature, seed=0, **shape), {}
    for name, likeliest in (("coupled", None), (f"of {DRAFT_TOP_K} tokens", DRAFT_TOP_K), ("of all tokens", 0)):
        sizes = []
        for ids in asked:
            n = min(LOCKSTEP_WINDOW, len(ids))
            row = Row(model.new_cache(), 0, ids, n, params, draw=Draw(range(n), "coupled", likeliest))
            [scored] = model.run([row])
            draft = Draft(tuple(scored.own), bytes(n), dists=tuple(scored.dists))
            sizes.append(encode([Proposal("0" * 32, len(ids), draft)]).ByteSize() / n)
        found[name] = round(sum(sizes) / len(sizes), 1)
    return found


def head(by_temperature: Mapping[str, Mapping[str, Mapping[str, float]]], size: Size) -> dict[str, Any]:
    """All figures, and in how many cells the block rule gives as many tokens as the ratio rule, as it should."""
    asked, wire = chats(size.prompts), {}
    for temperature in size.temperatures:
        wire[at(temperature)] = bytes_per_token(temperature, asked)
        wire[at(temperature)]["top_p 0.9, of all"] = bytes_per_token(temperature, asked, top_p=0.9)["of all tokens"]
    more = [
        each[f"block lines, {name}"]["tokens_per_pass"] >= each[f"ratio lines, {name}"]["tokens_per_pass"]
        for each in by_temperature.values()
        for name in CHAINS
    ]
    return {
        "modes": by_temperature,
        "tokens_per_round": {at(one): tokens_per_round(one, asked, size.tokens) for one in size.temperatures},
        "block_at_least_ratio": f"{sum(more)} of {len(more)} cells",
        "bytes_per_token": wire,
    }


def table(first: dict[str, Any]) -> Table:
    """Tokens per full pass, and per second."""
    made = Table("mode", *first["modes"], title="tokens per full pass / per second")
    for mode in MODES:
        cells = [each[mode.name] for each in first["modes"].values()]
        made.add_row(mode.name, *(f"{cell['tokens_per_pass']:.2f} / {cell['tokens_per_s']:.1f}" for cell in cells))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("rules", "Every rule of acceptance beside every other."), arguments)
    size = QUICK if chosen.quick else SIZE
    first = head(measure(size), size) | stamp()
    console.print(table(first))
    finish(first, first, chosen.results)


if __name__ == "__main__":
    main()
