"""Transformers' ``generate``: alone, assisted by the tiny model, and with prompt lookup.

The latter two take one request at a time: of several, one after another.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.peers.contract import Said, Setup, Turn

NUM_LOOKED_UP = 10  # tokens, as in Transformers' documentation


class HuggingFace:
    """The full model and its assistant."""

    def __init__(self, setup: Setup) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._full = _load(setup.models[-1])
        self._ways: dict[str, dict[str, Any]] = {
            "generate": {},
            "generate_assisted": {"assistant_model": _load(setup.models[0])},
            "generate_lookup": {"prompt_lookup_num_tokens": NUM_LOOKED_UP},
        }
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def generate(self, turn: Turn) -> Said:
        options = self._ways[turn.mode]
        alone = bool(options) or len(turn.prompts) == 1
        batches = [[prompt] for prompt in turn.prompts] if alone else [turn.prompts]
        said: list[list[int]] = []
        begin = time.perf_counter()
        for seed, batch in zip(turn.seeds, batches, strict=False):  # of a batch the first seed is everybody's
            said += self._batch(batch, turn, seed, options)
        return Said(time.perf_counter() - begin, said)

    def _batch(self, prompts: Sequence[Sequence[int]], turn: Turn, seed: int, options: dict[str, Any]) -> list[list[int]]:
        """Prompts padded to the longest."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        chosen: dict[str, Any] = {"do_sample": False}
        if turn.temperature:
            chosen = {"do_sample": True, "temperature": turn.temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
        out: torch.Tensor = self._full.generate(
            ids, attention_mask=mask, pad_token_id=0, max_new_tokens=turn.tokens, **chosen, **options
        )
        return out[:, longest:].tolist()

    def close(self) -> None: ...


def _load(source: str) -> PreTrainedModel:
    network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    network.generation_config.eos_token_id = None  # texts go on behind their end
    return network


def load(setup: Setup) -> HuggingFace:
    return HuggingFace(setup)
