"""This project's library, every tier in this process."""

import asyncio
import time
from itertools import count

import torch
import transformers

from benchmarks.peers.contract import Said, Setup, Turn
from cascade.answer import Completion
from cascade.local import Cascade
from cascade.params import Handling, SamplingParams, Speculation

SPECULATIONS = {
    "cascade_alone": Speculation("off"),
    "cascade_auto": Speculation(),
    "cascade_drafter": Speculation(),  # of a full tier without tiers below
}


class Ours:
    """One cascade, or its full tier with the drafter inside it."""

    def __init__(self, setup: Setup) -> None:
        models = setup.models[-1:] if setup.modes == ("cascade_drafter",) else setup.models
        self._cascade = Cascade.from_pretrained(models, dtype="float32")
        self._salts = count()
        self.versions = {"torch": torch.__version__, "transformers (below cascade)": transformers.__version__}

    def generate(self, turn: Turn) -> Said:
        """All requests at once, each with its seed."""
        begin = time.perf_counter()
        said = asyncio.run(self._together(turn))
        return Said(time.perf_counter() - begin, [list(completion.token_ids) for completion in said])

    async def _together(self, turn: Turn) -> list[Completion]:
        handling = Handling(cache_salt=str(next(self._salts)))  # no prompt is known, as none is to the others
        return await asyncio.gather(*(self._one(turn, i, handling) for i in range(len(turn.prompts))))

    async def _one(self, turn: Turn, index: int, handling: Handling) -> Completion:
        seed, prompt = turn.seeds[index], list(turn.prompts[index])
        params = SamplingParams(max_tokens=turn.tokens, temperature=turn.temperature, seed=seed, ignore_eos=True)
        completion = await self._cascade.agenerate(prompt, params, SPECULATIONS[turn.mode], handling)
        assert isinstance(completion, Completion)
        return completion

    def close(self) -> None:
        self._cascade.close()


def load(setup: Setup) -> Ours:
    return Ours(setup)
