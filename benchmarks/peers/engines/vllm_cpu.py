"""vLLM on the processor: one mode a worker, for how it drafts is part of how it is loaded."""

import time
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams

from benchmarks.peers.contract import MOST_REQUESTS, NUM_DRAFTED, POSITIONS, Said, Setup, Turn

NGRAM = {"prompt_lookup_max": 5, "prompt_lookup_min": 2}


def speculation(setup: Setup) -> dict[str, Any] | None:
    """vLLM's configuration of drafts, by mode."""
    (mode,) = setup.modes
    if mode == "vllm_ngram":
        return {"method": "ngram", "num_speculative_tokens": NUM_DRAFTED, **NGRAM}
    if mode == "vllm_draft":
        return {"method": "draft_model", "model": setup.models[0], "num_speculative_tokens": NUM_DRAFTED}
    return None


class VLLM:
    """The offline class, everything that is not said at its default; prompts are unknown, as they are to the others."""

    def __init__(self, setup: Setup) -> None:
        self._llm = LLM(
            model=setup.models[-1],
            dtype="float32",
            max_model_len=POSITIONS,
            max_num_seqs=MOST_REQUESTS,
            enable_prefix_caching=False,
            speculative_config=speculation(setup),
        )
        self.versions = {"vllm": vllm.__version__, "torch (below vllm)": torch.__version__}

    def generate(self, turn: Turn) -> Said:
        params = [
            SamplingParams(max_tokens=turn.tokens, temperature=turn.temperature, seed=seed, ignore_eos=True, detokenize=False)
            for seed in turn.seeds
        ]
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in turn.prompts]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return Said(time.perf_counter() - begin, [list(output.outputs[0].token_ids) for output in outputs])

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def load(setup: Setup) -> VLLM:
    return VLLM(setup)
