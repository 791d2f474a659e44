"""Conversations that a model writes by itself: the text that draft models are trained on.

A chat model that is given the opening of a user's turn writes that turn too, and then answers it (Magpie, Xu et al., arXiv
2406.08464). So prompts come from the model, like those it was tuned on, and no data are needed. A base model has no turns: it
continues its start token.

The engine that serves writes the text, too: each pass advances all texts by a token, and one that ends is replaced at once, so
that passes stay full.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cascade.engine.model import Model
from cascade.params import SamplingParams
from cascade.scorer import Row, Store

USERS_TEXT = "\ue000"  # stands for the user's text: a private character, which no template has
CANDIDATES = 64  # likeliest tokens that are sampled from
PROMPT_MIN_P = 0.1  # keeps users' turns sensible at temperature 1
TEMPERATURES = (0.0, 0.7, 1.0)  # answers take them in turn
STARTS = (  # beginnings of users' turns: half are the model's own from the first word on, the others cover frequent tasks
    *[""] * 8,
    "Write a Python function",
    "Summarize the following text:",
    "Translate",
    "Solve the following problem:",
    "Rewrite",
    "Read this document and answer the question.",
    "Explain",
    "Fix the bug in this code:",
)


@dataclass(frozen=True, slots=True)
class Turns:
    """Token ids around the texts of a conversation of one question and one answer."""

    opening: tuple[int, ...]  # up to the user's text; the start token for a base model
    answering: tuple[int, ...]  # between the user's text and the answer; none for a base model
    ends: frozenset[int]  # tokens that end a turn
    starts: tuple[tuple[int, ...], ...] = ((),)  # beginnings of users' turns

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> "Turns":
        """From the tokenizer's chat template, or the start token if it has no turns; ``ends`` are the model's end tokens."""
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else ends[0]
        base = cls((int(start),), (), frozenset(ends))
        if not tokenizer.chat_template:
            return base
        messages = [{"role": "user", "content": USERS_TEXT}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        before, _, after = text.partition(USERS_TEXT)
        opening, answering, *starts = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after, *STARTS))
        if not opening or not answering:  # a template that only joins texts
            return base
        return cls(tuple(opening), tuple(answering), frozenset({*ends, answering[0]}), tuple(map(tuple, starts)))


def end_tokens(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    end = network.generation_config.eos_token_id
    return [end] if isinstance(end, int) else list(end or [tokenizer.eos_token_id])


@dataclass(slots=True)
class Written:
    """One text: its token ids, the number of them before the answer (0 while the prompt is written), and its temperature."""

    tokens: list[int]
    prompt_len: int
    temperature: float

    def advance(self, token: int, turns: Turns, max_len: int) -> bool:
        """Append the next token; returns whether the text has ended."""
        ended, writes_prompt = token in turns.ends, not self.prompt_len
        if ended and writes_prompt:
            self.tokens += turns.answering
            self.prompt_len = len(self.tokens)
        else:
            self.tokens.append(token)
        return (ended and not writes_prompt) or len(self.tokens) >= max_len

    @property
    def answered(self) -> bool:
        return 0 < self.prompt_len < len(self.tokens)

    def params(self, seed: int) -> SamplingParams:
        """Of the next token."""
        if self.prompt_len:
            return SamplingParams(temperature=self.temperature, top_k=CANDIDATES, seed=seed)
        return SamplingParams(temperature=1.0, top_k=CANDIDATES, min_p=PROMPT_MIN_P, seed=seed)


def own_prompts(turns: Turns, skip: int = 0) -> Iterator[Written]:
    """Beginnings of conversations whose user's turn the model writes, without end; the first ``skip`` are left out."""
    number = skip
    while True:
        start = turns.starts[number // len(TEMPERATURES) % len(turns.starts)]
        begun = 0 if turns.answering else 1  # a base model answers from its start token on
        yield Written([*turns.opening, *start], begun, TEMPERATURES[number % len(TEMPERATURES)])
        number += 1


def given_prompts(prompts: Iterator[Sequence[int]]) -> Iterator[Written]:
    """Beginnings of conversations whose prompts are given: only the answers are written."""
    for number, tokens in enumerate(prompts):
        yield Written(list(tokens), len(tokens), TEMPERATURES[number % len(TEMPERATURES)])


def write(
    model: Model, turns: Turns, beginnings: Iterator[Written], *, rows: int = 128, max_len: int = 512, seed: int = 0
) -> Iterator[Written]:
    """Write ``rows`` texts at a time, and yield each when it ends, until no beginning is left.

    A text has at most ``max_len`` tokens. One that is cut off is yielded only if its answer had begun. ``seed`` is the first
    text's; those of others follow.
    """
    numbered = enumerate(beginnings, seed)
    live = [_Row(number, text, model.new_cache()) for number, text in islice(numbered, rows)]
    while live:
        going: list[_Row] = []
        for row, scored in zip(live, model.run([row.next() for row in live]), strict=True):
            row.cached = len(row.text.tokens)
            if not row.text.advance(scored.own[0], turns, max_len):
                going.append(row)
                continue
            row.cache.free()
            if row.text.answered:
                yield row.text
            going += [_Row(number, text, model.new_cache()) for number, text in islice(numbered, 1)]
        live = going


@dataclass(slots=True)
class _Row:
    """A text that is being written."""

    seed: int
    text: Written
    cache: Store
    cached: int = 0  # tokens whose keys and values are in the cache

    def next(self) -> Row:
        """What the next pass scores."""
        return Row(self.cache, self.cached, self.text.tokens[self.cached :], 1, self.text.params(self.seed))
