"""How often the own tokens of smaller models equal those of a larger one, measured along the larger one's answers.

`record` lets the full model answer prompts. Then every smaller model gives its own token at each position of each answer, in
one pass a text. Under shared noise a draft tier would guess the same tokens there, at any temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from cascade.chat.template import ChatTemplate
from cascade.engine.model import Model
from cascade.engine.threads import apart
from cascade.engine.tokenizer import Tokenizer
from cascade.llm import prompt_of
from cascade.local import Cascade, common_tokenizer
from cascade.messages import RUNNER_UPS
from cascade.params import SamplingParams
from cascade.prompts import Prompt
from cascade.scorer import Row, RunnerUp
from cascade.simulation.recording import Ranked, RecordedText, Recording

Written: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # token ids of a prompt and of the answer


def chat_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a chat in which a user says ``text``; for a model without a chat template, those of the text."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return tokenizer.encode_part(prompt_of(ChatTemplate(tokenizer), [{"role": "user", "content": text}]))


def record(
    models: Sequence[str],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    dtype: str | None = None,
    runner_ups: int = RUNNER_UPS,
) -> Recording:
    """Own tokens of each of ``models``, bottom to top, along the last one's answers to ``prompts``.

    Answer ``i`` has the seed ``i``. Each own token comes with ``runner_ups`` runner-ups. Answers of fewer than two tokens are
    left out. Raises `ModelError` if a model cannot be loaded, `ConfigError` if the models have different tokenizers.
    """
    common_tokenizer(models, trust_remote_code=False)
    seeded = [replace(params, seed=seed) for seed in range(len(prompts))]
    texts = written(models[-1], prompts, seeded, dtype)
    return along(models[:-1], texts, seeded, [prompt.category for prompt in prompts], dtype, runner_ups)


def along(
    drafts: Sequence[str],
    texts: Sequence[Written],
    params: Sequence[SamplingParams],
    categories: Sequence[str],
    dtype: str | None = None,
    runner_ups: int = RUNNER_UPS,
) -> Recording:
    """Own tokens of ``drafts``, bottom to top, along ``texts`` that the full model wrote, each with one of ``params``.

    Texts of fewer than two tokens are left out. Raises `ModelError` if a model cannot be loaded.
    """

    def of(source: str) -> list[tuple[Ranked, ...]]:
        return ranked(Model.from_pretrained(source, dtype=dtype), texts, params, runner_ups)

    below = [apart(partial(of, source)) for source in drafts]
    recorded = []
    for number, (category, (prompt, output)) in enumerate(zip(categories, texts, strict=True)):
        if len(output) > 1:
            full = tuple((RunnerUp(token, 0.0),) for token in output)
            recorded.append(RecordedText(prompt, (*(tier[number] for tier in below), full), category))
    return Recording(tuple(recorded))


def written(
    source: str, prompts: Sequence[Prompt], params: Sequence[SamplingParams], dtype: str | None = None
) -> list[Written]:
    """Each prompt with the answer of the model at a path or hub id, without drafts, all at once; raises `ModelError`."""
    with Cascade.from_pretrained([source], dtype=dtype, drafter=None) as full:
        ids = [tuple(chat_ids(full.tokenizer, prompt.text)) for prompt in prompts]
        return [(asked, answer.token_ids) for asked, answer in zip(ids, full.generate(ids, params), strict=True)]


def ranked(
    model: Model, texts: Sequence[Written], params: Sequence[SamplingParams], runner_ups: int = 0
) -> list[tuple[Ranked, ...]]:
    """Own tokens and runner-ups of a model at each position of each text, one pass a text."""
    of_texts = []
    for (prompt, output), own_params in zip(texts, params, strict=True):
        cache = model.new_cache()
        row = Row(cache, 0, [*prompt, *output[:-1]], len(output), own_params, runner_ups=runner_ups)
        [scored] = model.run([row])
        cache.free()
        beside = scored.runner_ups or [()] * len(scored.own)
        places = zip(scored.own, beside, strict=True)
        of_texts.append(tuple((RunnerUp(own, 0.0), *(RunnerUp(*other) for other in others)) for own, others in places))
    return of_texts


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often a tier's own token equals that of the full tier, as shares of positions."""

    positions: int
    own: float
    after_error: float | None  # the share at positions right after a difference; `None` if there are none
    runner_ups: tuple[float, ...]  # where own tokens differ: how often its first, second, ... runner-up is right


def agreement(recording: Recording, tier: int, category: str | None = None) -> Agreement:
    """Agreement of a tier (0 is the bottom one) with the full tier, over all texts or those of one category."""
    positions = right = after = after_right = 0
    ranks = [0] * max(RUNNER_UPS, *(len(near) - 1 for text in recording.texts for near in text.ranked[tier]))
    for text in recording.texts:
        if category is not None and text.category != category:
            continue
        before = True
        for near, full in zip(text.ranked[tier], text.ranked[-1], strict=True):
            same = near[0].token == full[0].token
            positions, right = positions + 1, right + same
            if not before:
                after, after_right = after + 1, after_right + same
            for rank, other in enumerate(near[1:]):
                ranks[rank] += not same and other.token == full[0].token
            before = same
    wrong = max(1, positions - right)
    return Agreement(
        positions, right / max(1, positions), after_right / after if after else None, tuple(count / wrong for count in ranks)
    )
