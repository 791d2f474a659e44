"""The family's texts and what each of its models says along them, recorded on this processor for emulated devices."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.asked import by_category, chat_ids
from cascade import family
from cascade.answer import Completion
from cascade.bench.prompts import Prompt
from cascade.engine.model import Model
from cascade.engine.threads import apart
from cascade.local import Cascade
from cascade.messages import RUNNER_UPS
from cascade.params import SamplingParams
from cascade.scorer import Row, RunnerUp
from cascade.simulation.recording import RecordedText, Recording, Said

FOLDER = Path(__file__).parents[1] / ".work"
PROMPTS, TOKENS = 2, 96  # of each category; of a text
DTYPE = "float32"  # in which texts do not depend on who shares a pass


def record(path: Path, prompts: int = PROMPTS, tokens: int = TOKENS) -> Recording:
    """Let the full model answer at temperature 0, ask every tier what it says there, and keep that in a file."""
    params = SamplingParams(max_tokens=tokens, temperature=0, seed=0, ignore_eos=True)
    asked = by_category(prompts)
    texts = written(asked, params)
    below = [apart(partial(said, source, texts, params)) for source in family.paths()[:-1]]
    found = []
    for number, (prompt, (ids, output)) in enumerate(zip(asked, texts, strict=True)):
        full = tuple((RunnerUp(token, 0.0),) for token in output)
        found.append(RecordedText(ids, (*(tier[number] for tier in below), full), prompt.category))
    recording = Recording(tuple(found))
    path.parent.mkdir(exist_ok=True)
    recording.save(path)
    return recording


def written(prompts: Sequence[Prompt], params: SamplingParams) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts, and what the full model alone answers, all at once."""
    with Cascade.from_pretrained(family.paths()[-1:], dtype=DTYPE, device="cpu", drafter=None) as full:

        async def write() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
            asked = [tuple(chat_ids(full.tokenizer, prompt.text)) for prompt in prompts]
            answers = await asyncio.gather(*(full.agenerate(ids, params) for ids in asked))
            outputs = [answer.token_ids for answer in answers if isinstance(answer, Completion)]
            return list(zip(asked, outputs, strict=True))

        return asyncio.run(write())


def said(
    source: str, texts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], params: SamplingParams
) -> list[tuple[Said, ...]]:
    """Own tokens and runner-ups of a model at each position of each text, one pass a text."""
    model, found = Model.from_pretrained(source, dtype=DTYPE, device="cpu"), []
    for prompt, output in texts:
        cache = model.new_cache()
        row = Row(cache, 0, [*prompt, *output[:-1]], len(output), params, runner_ups=RUNNER_UPS)
        [scored] = model.run([row])
        cache.free()
        places = zip(scored.own, scored.runner_ups, strict=True)
        found.append(tuple((RunnerUp(own, 0.0), *(RunnerUp(*one) for one in beside)) for own, beside in places))
    return found
