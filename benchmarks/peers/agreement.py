"""How often the small models of a family say what the full one says, along its own greedy answers.

    python -m benchmarks.peers.agreement '{"models": {...}, "prompts": [[...], ...], "tokens": 64, "end_ids": [2]}'

The only line of output is JSON: shares by name, ``null`` for a head that cannot be loaded.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peers.contract import Models
from benchmarks.peers.engines.ours import with_end
from benchmarks.peers.worker import answers
from cascade.drafters import EAGLE3, DrafterSpec
from cascade.errors import CascadeError
from cascade.local import Cascade
from cascade.messages import Edge
from cascade.params import SamplingParams, Speculation


def answers_and_head(
    models: Models, prompts: Sequence[Sequence[int]], tokens: int, end_ids: Sequence[int]
) -> tuple[list[list[int]], float | None]:
    """The full model's greedy answers, ending tokens included, and the share of passes whose first guess was right."""
    params = SamplingParams(max_tokens=tokens, temperature=0)
    try:
        cascade = Cascade.from_pretrained([models.full], dtype="float32", drafter=DrafterSpec(EAGLE3, models.head))
        speculation = Speculation(tiers=(EAGLE3,), branches=0)
    except CascadeError as error:
        print(f"The head is missing: {error}", file=sys.stderr)
        cascade = Cascade.from_pretrained([models.full], dtype="float32", drafter=None)
        speculation = Speculation("off")
    with cascade:
        completions = cascade.generate(prompts, params, speculation)
    edges = [edge for completion in completions for edge in completion.stats.edges if edge.drafter == EAGLE3]
    return [with_end(completion, end_ids) for completion in completions], first_guesses(edges)


def first_guesses(edges: Sequence[Edge]) -> float | None:
    """The share of first guesses that were accepted, of passes that scored one."""
    scored = sum(edge.proposed_by_position[0] for edge in edges if edge.proposed_by_position)
    right = sum(edge.accepted_by_position[0] for edge in edges if edge.accepted_by_position)
    return right / scored if scored else None


@torch.inference_mode()
def agreement(source: str, prompts: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> float:
    """The share of the positions of ``said`` at which the greedy token of the model at ``source`` is the one that is there."""
    network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    right = 0
    for prompt, answer in zip(prompts, said, strict=True):
        logits = network(torch.tensor([[*prompt, *answer[:-1]]]), logits_to_keep=len(answer)).logits
        right += int((logits[0].argmax(-1) == torch.tensor(answer)).sum())
    return right / sum(map(len, said))


def measure(models: Models, prompts: Sequence[Sequence[int]], tokens: int, end_ids: Sequence[int]) -> dict[str, float | None]:
    """Shares of tiny, medium and the head's first guess."""
    said, head = answers_and_head(models, prompts, tokens, end_ids)
    small = {name: agreement(source, prompts, said) for name, source in (("tiny", models.tiny), ("medium", models.medium))}
    shares: Mapping[str, float | None] = {**small, "head": head}
    return {name: None if share is None else round(share, 3) for name, share in shares.items()}


def main() -> None:
    out = answers()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    asked: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(measure(Models(**asked["models"]), asked["prompts"], asked["tokens"], asked["end_ids"])), file=out)


if __name__ == "__main__":
    main()
