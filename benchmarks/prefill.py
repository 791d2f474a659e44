"""Long prompts beside answers: how smoothly streams go on, and how soon new ones begin, beside vLLM with the same load.

    python -m benchmarks.prefill

Requests come at random, 32 are answered at once at most, and their prompts have 50 to 4,000 tokens. ``vllm bench serve`` asks
this project's server, without drafts and with those that the planner chooses, and vLLM's build for CPUs, one after another. A
*gap* is the time between two pieces of an answer. The last line is JSON; the document is kept in
``benchmarks/results/prefill.json``.
"""

import itertools
import random
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.document import console, finish, parsed, parser, stamp
from benchmarks.peers import served
from benchmarks.peers.contract import Models
from cascade import family
from cascade.engine.tokenizer import Tokenizer
from cascade.prompts import BUILT_IN, Prompt

SHORTEST, LONGEST = 50, 4000  # tokens of a prompt
TOKENS = 64  # of every answer
AT_ONCE, REQUESTS = 32, 40  # at most, and in all
RATE = 1.0  # requests that come in a second: more than two cores answer, so that streams pile up
FRAME = 96  # positions for a chat template
CACHE_GIB = 3  # at vLLM: room for all streams
FIGURES = {  # in milliseconds, by their names at ``vllm bench serve``
    "gap_ms": "median_itl_ms",
    "gap_p99_ms": "p99_itl_ms",
    "ttft_ms": "mean_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
}


def prompts(tokenizer: Tokenizer, number: int) -> list[Prompt]:
    """Texts of random words, of random lengths: none begins as another one does."""
    chance = random.Random(0)
    words = sorted({word for prompt in BUILT_IN for word in prompt.text.split()})
    sizes = {word: len(tokenizer.encode(f" {word}")) for word in words}
    texts = []
    for _ in range(number):
        most = chance.randint(SHORTEST, LONGEST)
        chosen = [chance.choice(words) for _ in range(most)]
        lengths = itertools.accumulate(sizes[word] for word in chosen)
        texts.append(" ".join(word for word, length in zip(chosen, lengths, strict=True) if length <= most))
    return [Prompt(text) for text in texts]


def measure(at_once: int, number: int, tokens: int) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Figures by mode of so many requests with answers of so many tokens, and why others are missing."""
    tiny, medium, full = family.paths()
    plan = served.Plan(
        prompts(Tokenizer.from_pretrained(full), number),
        tokens,
        0.0,
        {at_once: number},
        rate=RATE,
        positions=LONGEST + FRAME + tokens,
        cache_gib=CACHE_GIB,
        extra={"ignore_eos": True},
    )
    cells: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        arena = served.Arena(Models(full, tiny, medium), plan, stack)
        for mode in list(arena.modes):
            arena.ask(mode, 1, 1, f"warm-up {mode}")
            if result := arena.ask(mode, at_once, number, mode):
                cells[mode] = {name: round(result[key], 1) for name, key in FIGURES.items()}
                cells[mode]["tokens_per_second"] = round(result["output_throughput"], 1)
                cells[mode]["prompt_tokens"] = result["total_input_tokens"]
                console.print(f"{mode}: {cells[mode]}")
    return cells, arena.missing


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("prefill", "Long prompts beside answers."), arguments)
    at_once, number, tokens = (4, 4, 8) if chosen.quick else (AT_ONCE, REQUESTS, TOKENS)
    cells, missing = measure(at_once, number, tokens)
    how = {"at_once": at_once, "requests": number, "rate": RATE, "prompt_tokens": [SHORTEST, LONGEST], "tokens": tokens}
    document: dict[str, Any] = {"prefill": cells, "how": how, "missing": missing}
    finish(document | stamp(), document, chosen.results)


if __name__ == "__main__":
    main()
