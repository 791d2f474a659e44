"""What a process does that leads the ranks of a model: it says what they wrote, and what one process alone writes."""

import asyncio
import os
import signal
from typing import Any

import torch
from torch import Tensor

from cascade import Cascade, SamplingParams, Unavailable
from cascade.engine.adapters import AdaptedModel
from cascade.engine.loading import load
from cascade.engine.model import Model
from cascade.engine.parallel import LeadingModel
from cascade.engine.tokenizer import Tokenizer
from cascade.scorer import Row
from tests import small

PROMPTS = [[5, 9, 2, 44, 17], list(range(3, 60)), [*range(3, 58), 7, 7]]  # with beginnings in common


def launch(source: str, ranks: int, **options: Any) -> LeadingModel:
    torch.set_num_threads(1)
    device = None if torch.cuda.is_available() else "cpu"
    return LeadingModel.launch(source, ranks, dtype="float32", device=device, **options)


def ended(model: LeadingModel) -> list[int | None]:
    """How the other ranks of a model ended that is closed."""
    return [follower.returncode for follower in model._followers]


def write(source: str, ranks: int, quantization: str | None = None) -> dict[str, Any]:
    """Texts behind a drafter, and logits."""
    shared = launch(source, ranks, quantization=quantization)
    alone = Model.from_pretrained(source, dtype="float32", device="cpu", quantization=quantization)
    drafter = Model.from_pretrained(source, dtype="bfloat16", device="cpu")
    tokenizer, texts = Tokenizer.from_pretrained(small.paths()[0]), []
    with Cascade([drafter, shared], tokenizer) as cascade, Cascade([alone], tokenizer) as single:
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
            texts.append([[list(c.token_ids) for c in one.generate(PROMPTS * 2, params)] for one in (cascade, single)])
        again = cascade.generate(PROMPTS[1], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    params = SamplingParams(temperature=0, seed=0)
    found = [logits(model, params) for model in (shared, alone)]
    shared.close()
    return {
        "error": (found[0] - found[1]).abs().max().item(),
        "same": [theirs == own for theirs, own in texts],
        "again": list(again.token_ids) == texts[0][0][1],
        "ended": ended(shared),
    }


def logits(model: Model, params: SamplingParams) -> Tensor:
    """Of a text, of another end of it in the same pass, and of what follows that one."""
    store = model.new_cache()
    fork = store.fork(40)
    both = model.logits([Row(store, 0, PROMPTS[1], 57, params), Row(fork, 40, PROMPTS[0], 5, params)])
    store.join(fork)
    return torch.cat([both, model.logits([Row(store, 45, PROMPTS[0], 5, params)])])


def adapt(source: str, ranks: int, adapters: dict[str, str]) -> dict[str, Any]:
    """Texts with one adapter, with the other and with none, in shared passes."""
    shared = launch(source, ranks, adapters=adapters)
    alone = AdaptedModel(load(source, dtype="float32", device=str(shared.device)), adapters)
    tokenizer, texts = Tokenizer.from_pretrained(small.paths()[0]), []
    asked = [SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, adapter=name) for name in ("", *adapters)]

    async def text(cascade: Cascade) -> list[list[list[int]]]:
        done = await asyncio.gather(*(cascade.agenerate(PROMPTS[:2], params) for params in asked))
        return [[list(completion.token_ids) for completion in completions] for completions in done]

    for model in (shared, alone):
        with Cascade([model], tokenizer) as cascade:
            texts.append(asyncio.run(text(cascade)))
    shared.close()
    return {"same": texts[0] == texts[1], "different": len(set(map(str, texts[1]))), "ended": ended(shared)}


def lose(source: str, ranks: int) -> dict[str, Any]:
    """What is said of a request when a rank was killed."""
    shared, said = launch(source, ranks), ""
    with Cascade([shared], Tokenizer.from_pretrained(small.paths()[0])) as cascade:
        cascade.generate(PROMPTS[0], SamplingParams(max_tokens=4))
        os.kill(shared._followers[-1].pid, signal.SIGKILL)
        shared._followers[-1].wait()
        try:
            cascade.generate(PROMPTS[0], SamplingParams(max_tokens=64))
        except Unavailable as error:
            said = str(error)
    healthy = shared.healthy
    shared.close()
    return {"error": said, "healthy": healthy}
