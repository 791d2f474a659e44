"""This project's library: without a head as it is served, or with one, whose layers are read in every pass."""

import time
from collections.abc import Sequence
from itertools import count

import torch
import transformers

from benchmarks.peers.contract import Said, Setup, Turn
from cascade.answer import Completion
from cascade.drafters import EAGLE3, DrafterSpec
from cascade.local import Cascade
from cascade.params import Handling, SamplingParams, Speculation

TEXT_DRAFTERS = ("suffix", "lookup")
WITHOUT_HEAD = {
    "cascade_alone": Speculation("off"),
    "cascade_auto": Speculation(),
    "cascade_suffix": Speculation(tiers=("suffix",)),
    "cascade_lookup": Speculation(tiers=("lookup",)),
    "cascade_tiny": Speculation(tiers=("tiny",)),
    "cascade_medium": Speculation(tiers=("medium",)),
    "cascade_tiny_medium": Speculation(tiers=("tiny", "medium")),
}
WITH_HEAD = {
    "cascade_head": Speculation(tiers=(EAGLE3,)),
    "cascade_head_suffix": Speculation(tiers=(EAGLE3, "suffix")),
}


class Ours:
    """The cascades that the modes need."""

    def __init__(self, setup: Setup) -> None:
        self._salts = count()
        self._end_ids = setup.end_ids
        self._cascades: dict[str, Cascade] = {}  # by mode
        family = [setup.models.tiny, setup.models.medium, setup.models.full]
        plain = [DrafterSpec(kind) for kind in TEXT_DRAFTERS]
        headed = [DrafterSpec("suffix"), DrafterSpec(EAGLE3, setup.models.head)]
        for modes, drafters in ((WITHOUT_HEAD, plain), (WITH_HEAD, headed)):
            if wanted := [mode for mode in setup.modes if without_dtype(mode) in modes]:
                alone = all(without_dtype(mode) == "cascade_alone" for mode in wanted)
                models = family[-1:] if alone else family
                cascade = Cascade.from_pretrained(models, dtype=setup.dtype, drafter=drafters)
                self._cascades |= dict.fromkeys(wanted, cascade)
        self.versions = {"torch": torch.__version__, "transformers (below cascade)": transformers.__version__}

    def generate(self, turn: Turn) -> Said:
        params = SamplingParams(max_tokens=turn.tokens, temperature=turn.temperature, seed=turn.seed)
        handling = Handling(cache_salt=str(next(self._salts)))  # no prompt is known, as none is to the others
        speculation = (WITHOUT_HEAD | WITH_HEAD)[without_dtype(turn.mode)]
        begin = time.perf_counter()
        said = self._cascades[turn.mode].generate(list(turn.prompt), params, speculation, handling)
        seconds = time.perf_counter() - begin
        assert isinstance(said, Completion)
        return Said(seconds, with_end(said, self._end_ids))

    def close(self) -> None:
        for cascade in set(self._cascades.values()):
            cascade.close()


def with_end(said: Completion, end_ids: Sequence[int]) -> list[int]:
    """All tokens of an answer: the one that ended it is counted, and not handed out."""
    ended = said.stats.completion_tokens > len(said.token_ids)
    return [*said.token_ids, *(end_ids[:1] if ended else ())]


def without_dtype(mode: str) -> str:
    return mode.removesuffix("_bf16")


def load(setup: Setup) -> Ours:
    return Ours(setup)
