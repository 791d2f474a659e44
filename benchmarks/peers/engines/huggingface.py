"""Transformers' ``generate``: alone, with prompt lookup, and assisted by the tiny model."""

import time
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
        self._full = _load(setup.models.full, setup)
        self._ways: dict[str, dict[str, Any]] = {
            "generate": {},
            "generate_lookup": {"prompt_lookup_num_tokens": NUM_LOOKED_UP},
            "generate_assisted": {"assistant_model": _load(setup.models.tiny, setup)},
        }
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def generate(self, turn: Turn) -> Said:
        options = self._ways[turn.mode]
        chosen: dict[str, Any] = {"do_sample": False}
        if turn.temperature:
            chosen = {"do_sample": True, "temperature": turn.temperature, "top_k": 0, "top_p": 1.0}
        ids = torch.tensor([turn.prompt])
        torch.manual_seed(turn.seed)
        begin = time.perf_counter()
        mask = torch.ones_like(ids)
        out: torch.Tensor = self._full.generate(ids, attention_mask=mask, max_new_tokens=turn.tokens, **chosen, **options)
        seconds = time.perf_counter() - begin
        return Said(seconds, out[0, ids.shape[1] :].tolist())

    def close(self) -> None: ...


def _load(source: str, setup: Setup) -> PreTrainedModel:
    network = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, setup.dtype)).eval()
    network.generation_config.eos_token_id = list(setup.end_ids)
    network.generation_config.pad_token_id = setup.end_ids[0]  # said, so that nothing warns; one text has no padding
    return network


def load(setup: Setup) -> HuggingFace:
    return HuggingFace(setup)
