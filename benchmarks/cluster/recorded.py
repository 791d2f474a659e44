"""The family's texts and what each of its models says along them, recorded on this processor for emulated devices."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from benchmarks.cluster.recording import RecordedText, Recording, Said
from benchmarks.prompts import by_category, chat_ids
from cascade import family
from cascade.answer import Completion
from cascade.bench.prompts import Prompt
from cascade.engine.model import Model
from cascade.engine.threads import apart
from cascade.local import Cascade
from cascade.messages import RUNNER_UPS
from cascade.params import SamplingParams
from cascade.scorer import Row, RunnerUp

PROMPTS, TOKENS = 2, 96  # of each category; of a text
DTYPE = "float32"  # in which texts do not depend on who shares a pass

Written: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # a prompt and what follows, token ids


def record(prompts: int = PROMPTS, tokens: int = TOKENS) -> Recording:
    """Let the full model answer so many prompts of each category, and ask every tier what it says there."""
    asked = by_category(prompts)
    params = [SamplingParams(max_tokens=tokens, temperature=0, seed=seed) for seed in range(len(asked))]
    texts = written(asked, params)
    below = [apart(partial(said, source, texts, params)) for source in family.paths()[:-1]]
    found = []
    for number, (prompt, (ids, output)) in enumerate(zip(asked, texts, strict=True)):
        full = tuple((RunnerUp(token, 0.0),) for token in output)
        found.append(RecordedText(ids, (*(tier[number] for tier in below), full), prompt.category))
    return Recording(tuple(found))


def written(prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Written]:
    """Prompts, and what the full model alone answers, all at once."""
    with Cascade.from_pretrained(family.paths()[-1:], dtype=DTYPE, device="cpu", drafter=None) as full:

        async def write() -> list[Written]:
            asked = [tuple(chat_ids(full.tokenizer, prompt.text)) for prompt in prompts]
            answers = await asyncio.gather(*(full.agenerate(ids, own) for ids, own in zip(asked, params, strict=True)))
            outputs = [answer.token_ids for answer in answers if isinstance(answer, Completion)]
            return list(zip(asked, outputs, strict=True))

        return asyncio.run(write())


def said(source: str, texts: Sequence[Written], params: Sequence[SamplingParams]) -> list[tuple[Said, ...]]:
    """Own tokens and runner-ups of a model at each position of each text, one pass a text."""
    model, found = Model.from_pretrained(source, dtype=DTYPE, device="cpu"), []
    for (prompt, output), own_params in zip(texts, params, strict=True):
        cache = model.new_cache()
        row = Row(cache, 0, [*prompt, *output[:-1]], len(output), own_params, runner_ups=RUNNER_UPS)
        [scored] = model.run([row])
        cache.free()
        places = zip(scored.own, scored.runner_ups, strict=True)
        found.append(tuple((RunnerUp(own, 0.0), *(RunnerUp(*one) for one in beside)) for own, beside in places))
    return found
