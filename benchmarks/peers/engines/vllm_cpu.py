"""vLLM on the processor: one mode a worker, for how it drafts is part of how it is loaded."""

import time

import torch
import vllm
from vllm import LLM, SamplingParams

from benchmarks.peers.contract import POSITIONS, Said, Setup, Turn, vllm_drafts


class VLLM:
    """The offline class, everything that is not said at its default; prompts are unknown, as they are to the others."""

    def __init__(self, setup: Setup) -> None:
        (mode,) = setup.modes
        self._llm = LLM(
            model=setup.models.full,
            dtype=setup.dtype,
            max_model_len=POSITIONS,
            max_num_seqs=1,
            enable_prefix_caching=False,
            speculative_config=vllm_drafts(mode, setup.models.tiny),
        )
        self._end_ids = list(setup.end_ids)
        self.versions = {"vllm": vllm.__version__, "torch (below vllm)": torch.__version__}

    def generate(self, turn: Turn) -> Said:
        params = SamplingParams(
            max_tokens=turn.tokens,
            temperature=turn.temperature,
            seed=turn.seed if turn.temperature else None,
            stop_token_ids=self._end_ids,
            detokenize=False,
        )
        prompt = {"prompt_token_ids": list(turn.prompt)}
        begin = time.perf_counter()
        (output,) = self._llm.generate([prompt], params, use_tqdm=False)
        return Said(time.perf_counter() - begin, list(output.outputs[0].token_ids))

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def load(setup: Setup) -> VLLM:
    return VLLM(setup)
