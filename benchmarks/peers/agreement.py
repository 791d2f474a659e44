"""How often the small models of a family say what the full one says, along its own greedy answers.

    python -m benchmarks.peers.agreement '{"models": {...}, "prompts": [[...], ...], "tokens": 64, "end_ids": [2]}'

The only line of output is JSON: shares by name.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peers.contract import Models
from benchmarks.peers.engines.ours import with_end
from benchmarks.peers.worker import answers
from cascade.local import Cascade
from cascade.params import SamplingParams, Speculation


def answers_of(models: Models, prompts: Sequence[Sequence[int]], tokens: int, end_ids: Sequence[int]) -> list[list[int]]:
    """The full model's greedy answers, ending tokens included."""
    params = SamplingParams(max_tokens=tokens, temperature=0)
    with Cascade.from_pretrained([models.full], dtype="float32", drafter=None) as cascade:
        return [with_end(completion, end_ids) for completion in cascade.generate(prompts, params, Speculation("off"))]


@torch.inference_mode()
def agreement(source: str, prompts: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> float:
    """The share of the positions of ``said`` at which the greedy token of the model at ``source`` is the one that is there."""
    network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    right = 0
    for prompt, answer in zip(prompts, said, strict=True):
        logits = network(torch.tensor([[*prompt, *answer[:-1]]]), logits_to_keep=len(answer)).logits
        right += int((logits[0].argmax(-1) == torch.tensor(answer)).sum())
    return right / sum(map(len, said))


def measure(models: Models, prompts: Sequence[Sequence[int]], tokens: int, end_ids: Sequence[int]) -> dict[str, float]:
    """Shares of tiny and medium."""
    said = answers_of(models, prompts, tokens, end_ids)
    small = {"tiny": models.tiny, "medium": models.medium}
    return {name: round(agreement(source, prompts, said), 3) for name, source in small.items()}


def main() -> None:
    out = answers()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    asked: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(measure(Models(**asked["models"]), asked["prompts"], asked["tokens"], asked["end_ids"])), file=out)


if __name__ == "__main__":
    main()
