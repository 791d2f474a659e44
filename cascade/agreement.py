"""How often the own tokens of smaller models equal those of a larger one, measured along the larger one's answers.

`record` lets the full model answer prompts. Then every smaller model gives its own token at each position of each answer, in
one pass a text. Under shared noise a draft tier would guess the same tokens there, at any temperature.

`search` finds the layers of a model that agree best with it at a given share of its pass (SWIFT, Xia et al., arXiv 2410.06916,
here over whole layers). It begins with the better of two sets: evenly spread layers, and the layers whose single removal
changes the model most. Then it swaps a random layer that is kept for one that is not, and keeps the swap if it is no worse. It
uses every second answer; the others measure the agreement of the result.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from cascade.chat.template import ChatTemplate
from cascade.engine.model import Model
from cascade.engine.threads import apart
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import ConfigError
from cascade.llm import prompt_of
from cascade.local import Cascade, common_tokenizer
from cascade.messages import RUNNER_UPS
from cascade.params import SamplingParams
from cascade.prompts import Prompt
from cascade.scorer import Row, RunnerUp
from cascade.simulation.recording import Ranked, RecordedText, Recording
from cascade.training.student import spread

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


@dataclass(frozen=True, slots=True)
class Found:
    """Layers of a model as a tier."""

    layers: tuple[int, ...]
    num_layers: int  # layers of the whole model
    share: float  # share of the weights that a pass of the whole model reads
    agreement: float  # share of equal positions in the answers that the search did not use


def search(
    source: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    shares: Sequence[float],
    trials: int,
    tell: Callable[[str], object] = lambda text: None,
    dtype: str | None = None,
) -> list[Found]:
    """For each of ``shares`` the layers whose pass reads at most that share of the weights, after ``trials`` swaps.

    Answer ``i`` has the seed ``i``. Raises `ModelError` if the model cannot be loaded, `ConfigError` if it writes fewer than
    two answers, or if no layers have such a share.
    """
    seeded = [replace(params, seed=seed) for seed in range(len(prompts))]
    answers = [(text, own) for text, own in zip(written(source, prompts, seeded, dtype), seeded, strict=True) if text[1]]
    if len(answers) < 2:  # one for the search, one to measure the result
        raise ConfigError(f"{source} wrote {len(answers)} answers: give more prompts")
    model = Model.from_pretrained(source, dtype=dtype)
    whole, each, head = model.weights_read
    total = whole * each + head
    numbers = [int((share * total - head) / each + 1e-9) for share in shares]
    for share, kept in zip(shares, numbers, strict=True):
        if not 0 < kept < whole:
            least, most = ((count * each + head) / total for count in (1, whole - 1))
            raise ConfigError(f"share is {share:g}: some of the {whole} layers take from {least:.2f} to {most:.2f} of a pass")

    def rate(layers: Sequence[int], texts: Sequence[tuple[Written, SamplingParams]] = answers[::2]) -> float:
        """How often the own token of ``layers`` is the model's."""
        own_tokens = ranked(model.cut(layers), [text for text, _ in texts], [own for _, own in texts])
        pairs = zip(own_tokens, texts, strict=True)
        same = [near[0].token == token for own, (text, _) in pairs for near, token in zip(own, text[1], strict=True)]
        return sum(same) / len(same)

    without: list[float] = []  # the agreement without each layer
    for layer in range(whole):
        tell(f"without layer {layer} of {whole}")
        without.append(rate([other for other in range(whole) if other != layer]))
    found = []
    for kept in numbers:
        needed = tuple(sorted(sorted(range(whole), key=without.__getitem__)[:kept]))
        right, best = max(((rate(layers), layers) for layers in (spread(whole, kept), needed)), key=lambda pair: pair[0])
        rng = random.Random(0)
        for trial in range(trials):
            tell(f"{kept} of {whole} layers, swap {trial + 1} of {trials}: {right:.2f}")
            out, new = rng.choice(best), rng.choice([layer for layer in range(whole) if layer not in best])
            other = tuple(sorted({*best, new} - {out}))
            if (share := rate(other)) >= right:
                best, right = other, share
        found.append(Found(best, whole, (kept * each + head) / total, rate(best, answers[1::2])))
    return found
