"""This project's library, as it is served."""

import time
from collections.abc import Sequence
from itertools import count

import torch
import transformers

from benchmarks.peers.contract import Said, Setup, Turn
from cascade.answer import Completion
from cascade.local import Cascade
from cascade.params import Handling, SamplingParams, Speculation

TEXT_DRAFTERS = ("suffix",)
MODES = {
    "cascade_alone": Speculation("off"),
    "cascade_auto": Speculation(),
    "cascade_suffix": Speculation(tiers=("suffix",)),
    "cascade_tiny": Speculation(tiers=("tiny",)),
    "cascade_suffix_tiny": Speculation(tiers=("suffix", "tiny")),  # in both tiers
    "cascade_medium": Speculation(tiers=("medium",)),
    "cascade_tiny_medium": Speculation(tiers=("tiny", "medium")),
}


class Ours:
    """The cascades that the modes need."""

    def __init__(self, setup: Setup) -> None:
        self._salts = count()
        self._end_ids = setup.end_ids
        family = [model for model in (setup.models.tiny, setup.models.medium, setup.models.full) if model]
        alone = all(without_dtype(mode) == "cascade_alone" for mode in setup.modes)
        models = family[-1:] if alone else family
        self._cascade = Cascade.from_pretrained(models, dtype=setup.dtype, drafter=TEXT_DRAFTERS)
        self.versions = {"torch": torch.__version__, "transformers (below cascade)": transformers.__version__}

    def generate(self, turn: Turn) -> Said:
        params = SamplingParams(max_tokens=turn.tokens, temperature=turn.temperature, seed=turn.seed)
        handling = Handling(cache_salt=str(next(self._salts)))  # no prompt is known, as none is to the others
        speculation = MODES[without_dtype(turn.mode)]
        begin = time.perf_counter()
        completion = self._cascade.generate(list(turn.prompt), params, speculation, handling)
        seconds = time.perf_counter() - begin
        assert isinstance(completion, Completion)
        return Said(seconds, with_end(completion, self._end_ids))

    def close(self) -> None:
        self._cascade.close()


def with_end(completion: Completion, end_ids: Sequence[int]) -> list[int]:
    """All tokens of an answer: the one that ended it is counted, and not handed out."""
    ended = completion.stats.completion_tokens > len(completion.token_ids)
    return [*completion.token_ids, *(end_ids[:1] if ended else ())]


def without_dtype(mode: str) -> str:
    return mode.removesuffix("_bf16")


def load(setup: Setup) -> Ours:
    return Ours(setup)
