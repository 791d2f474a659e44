"""How often the verifier's own token is the drafter's, and how often it is at least one of the drafter's runner-ups.

Every figure is a share of teacher-forced positions of the embedded family, in float32, with the noise that a served request
has. Texts are held-out files, and what the full model writes behind the beginnings of such files.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import torch
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.trees.cells import at
from cascade import family
from cascade.answer import Completion
from cascade.engine.sampling import own_tokens_and_next
from cascade.family import corpus
from cascade.family.evaluate import JUDGED_ROWS, PROMPT, WRITTEN, Text, as_rows, load
from cascade.local import Cascade
from cascade.messages import RUNNER_UPS
from cascade.params import SamplingParams

TEMPERATURES = (0.0, 0.7, 1.0)
MOST_BYTES = 32_768  # of a held-out file
EDGES = tuple(combinations(family.NAMES, 2))
TOP = family.NAMES[-2:]  # the edge whose corrections cost most
HELD_OUT, WRITTEN_BY_FULL = "held-out files", "written by full"

Shares: TypeAlias = Mapping[str, Sequence[float]]  # by edge: of own tokens, with one runner-up, with two


@dataclass(frozen=True, slots=True)
class Size:
    """How much text is judged."""

    rows: int = 12
    length: int = 512  # tokens of a row of held-out text
    prompt: int = PROMPT
    written: int = WRITTEN  # tokens behind a prompt


def measure(size: Size) -> dict[str, dict[str, Shares]]:
    """Shares by text and temperature."""
    rows = held_out(size)
    texts = written(rows[:, : size.prompt], size.written)
    models = load(family.WEIGHTS)
    found = {HELD_OUT: shares(models, Text(rows), TEMPERATURES), WRITTEN_BY_FULL: {}}
    for temperature, text in texts.items():
        found[WRITTEN_BY_FULL] |= shares(models, text, [temperature])
    return found


def held_out(size: Size) -> Tensor:
    """Rows from all over the held-out files ``[rows, length]``."""
    tokenizer = AutoTokenizer.from_pretrained(family.paths()[-1])
    # a large file would be half of the text, and takes seconds to encode
    files = [path for path in corpus.source_files("held_out") if path.stat().st_size < MOST_BYTES]
    files = files[:: max(1, len(files) // (4 * size.rows))]
    rows = as_rows(corpus.encode(tokenizer, files), size.length)
    return rows[:: max(1, len(rows) // size.rows)][: size.rows]


def written(prompts: Tensor, num_tokens: int) -> dict[float, Text]:
    """What the full model says behind the prompts at each temperature, each row as a request with a seed of its own."""
    with Cascade.from_pretrained(family.paths()[-1:], dtype="float32", device="cpu") as full:

        async def write(temperature: float) -> Text:
            answers = (
                full.agenerate(row, SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=seed, ignore_eos=True))
                for seed, row in enumerate(prompts.tolist())
            )
            said = [answer.token_ids for answer in await asyncio.gather(*answers) if isinstance(answer, Completion)]
            return Text(torch.cat([prompts, torch.tensor(said)], 1), prompts.shape[1])

        return {temperature: asyncio.run(write(temperature)) for temperature in TEMPERATURES}


@torch.inference_mode()
def shares(models: Mapping[str, LlamaForCausalLM], text: Text, temperatures: Sequence[float]) -> dict[str, Shares]:
    """By temperature."""
    hits = {(t, edge): torch.zeros(1 + RUNNER_UPS, dtype=torch.int64) for t in temperatures for edge in EDGES}
    for number, part in enumerate(text.rows.split(JUDGED_ROWS)):
        logits = {
            name: model(part, use_cache=False).logits[:, text.prompt - 1 : -1].flatten(0, 1) for name, model in models.items()
        }
        for t in temperatures:
            rows = _requests(text, t, range(number * JUDGED_ROWS, number * JUDGED_ROWS + len(part)))
            said = {name: own_tokens_and_next(one, rows, RUNNER_UPS)[: 1 + RUNNER_UPS] for name, one in logits.items()}
            for low, high in EDGES:
                hits[t, (low, high)] += (said[low] == said[high][0]).sum(1)
    judged = text.rows[:, text.prompt :].numel()
    return {
        at(t): {" → ".join(edge): [round(x, 4) for x in (hits[t, edge].cumsum(0) / judged).tolist()] for edge in EDGES}
        for t in temperatures
    }


def _requests(text: Text, temperature: float, seeds: Sequence[int]) -> list[tuple[SamplingParams, int, int]]:
    """Each row as the request that `written` makes of it, for `own_tokens_and_next`."""
    size = text.rows.shape[1] - text.prompt
    return [(SamplingParams(temperature=temperature, seed=seed), text.prompt, size) for seed in seeds]


def headline(found: Mapping[str, Mapping[str, Shares]]) -> dict[str, float]:
    """With both runner-ups, on held-out files, of the top edge."""
    return {temperature: edges[" → ".join(TOP)][-1] for temperature, edges in found[HELD_OUT].items()}


def table(found: Mapping[str, Mapping[str, Shares]]) -> Table:
    title = "The verifier's own token is the drafter's (lines), or its runner-up, or the second (trees)"
    result = Table("text", "edge", *map(at, TEMPERATURES), title=title)
    for text, temperatures in found.items():
        for edge in map(" → ".join, EDGES):
            ranks = (edges[edge] for edges in temperatures.values())
            result.add_row(text, edge, *("  ".join(f"{share:.3f}" for share in row) for row in ranks))
    return result
