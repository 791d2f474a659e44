"""Conversations that a model writes by itself, as text to train draft models.

A chat model that gets the opening of a user's turn also writes that turn, and then answers it (Magpie, Xu et al., arXiv
2406.08464). So prompts come from the model itself, similar to those it was tuned on, and no data are needed. A base model has
no turns: it continues its start token.

The serving engine writes the text: each pass extends all texts by a token, and a text that ends is replaced by a new one, so
that passes stay full. The passes of a teacher also give its likeliest tokens at each position.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from cascade.engine.model import Model
from cascade.engine.sampling.own_tokens import scored
from cascade.params import SamplingParams
from cascade.scorer import Row, Store
from cascade.training.text import HELD_OUT, Likeliest, Text

USERS_TEXT = "\ue000"  # placeholder for the user's text: a private-use character, which no template has
CANDIDATES = 64  # likeliest tokens from which to sample
PROMPT_MIN_P = 0.1  # min-p of users' turns, which keeps them sensible at temperature 1
TEMPERATURES = (0.0, 0.7, 1.0)  # temperatures of answers, in turns
BEGUN = 8  # texts that begin in one pass at most; it reads their whole prompts, so this bounds its memory
STARTS = (  # beginnings of users' turns: half are empty, the others cover frequent tasks
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
    answering: tuple[int, ...]  # between the user's text and the answer; empty for a base model
    ends: frozenset[int]  # tokens that end a turn
    starts: tuple[tuple[int, ...], ...] = ((),)  # beginnings of users' turns

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> "Turns":
        """Turns by the tokenizer's chat template; only the start token if there is none.

        ``ends`` are the end tokens that the model's configuration names, see `configured_ends`.
        """
        ends = ends or {tokenizer.eos_token_id}
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else min(ends)
        base = cls((int(start),), (), frozenset(ends))
        if not tokenizer.chat_template:
            return base
        messages = [{"role": "user", "content": USERS_TEXT}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        before, _, after = text.partition(USERS_TEXT)
        opening, answering, *starts = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after, *STARTS))
        if not opening or not answering:  # the template only concatenates texts
            return base
        return cls(tuple(opening), tuple(answering), frozenset({*ends, answering[0]}), tuple(map(tuple, starts)))


def own_prompts(turns: Turns, skip: int = 0) -> Iterator[Text]:
    """Endless beginnings of conversations whose user's turn the model writes, without the first ``skip``.

    A base model continues its start token, and never at temperature 0, where it would always write the same text.
    """
    begun, temperatures = (0, TEMPERATURES) if turns.answering else (1, TEMPERATURES[1:])
    for number in count(skip):
        turn, place = divmod(number, len(temperatures))
        start = turns.starts[turn % len(turns.starts)]
        yield Text([*turns.opening, *start], begun, temperatures[place], number % HELD_OUT == 0)


def given_prompts(prompts: Sequence[Sequence[int]], skip: int = 0) -> Iterator[Text]:
    """Endless beginnings of conversations with given prompts, in rounds: the model writes only the answers.

    The first ``skip`` are left out. A prompt is answered at each temperature in turn, but only once at 0, where its answer is
    always the same.
    """
    for number in count(skip):
        turn, place = divmod(number, len(prompts))
        temperature = TEMPERATURES[(place + turn) % len(TEMPERATURES)]
        if temperature or number - skip < len(TEMPERATURES) * len(prompts):
            yield Text([*prompts[place]], len(prompts[place]), temperature, place % HELD_OUT == 0)


def write(
    model: Model, turns: Turns, beginnings: Iterator[Text], *, rows: int, max_len: int, seed: int = 0, score: bool = False
) -> Iterator[Text]:
    """Write ``rows`` texts at a time, and yield each when it ends, until no beginning is left.

    A text has at most ``max_len`` tokens. A text that is cut off is yielded only if its answer had begun. The first text has
    the seed ``seed``, and the others the following ones. With ``score``, passes also give the likeliest tokens after each
    token.
    """
    numbered, going = enumerate(beginnings, seed), list[_Row]()
    while live := [*going, *(_Row(*begun, model.new_cache()) for begun in islice(numbered, min(BEGUN, rows - len(going))))]:
        asked, going = [row.next(score) for row in live], []
        passed = _scored(model, asked) if score else [(result.own[-1], []) for result in model.run(asked)]
        for row, (token, likeliest) in zip(live, passed, strict=True):
            row.text.likeliest += likeliest
            if row.advance(token, turns, max_len):
                going.append(row)
                continue
            row.cache.free()
            if 0 < row.text.prompt_len < len(row.text.tokens):
                yield row.text


@torch.inference_mode()
def _scored(model: Model, rows: Sequence[Row]) -> list[tuple[int, list[Likeliest]]]:
    """Run a pass: for each row the own token after it, and the model's likeliest tokens after each of its tokens."""
    logits, ends = model.logits(rows), np.cumsum([row.num_scored for row in rows])[:-1]
    parts = zip(*(np.split(part, ends) for part in Likeliest.of(logits)), strict=True)
    return [(result.own[-1], [Likeliest(*part)]) for result, part in zip(scored(logits, rows), parts, strict=True)]


@dataclass(slots=True)
class _Row:
    """A text that is being written."""

    seed: int
    text: Text
    cache: Store
    cached: int = 0  # tokens whose keys and values are in the cache

    def next(self, score: bool) -> Row:
        """The row for the next pass; it wants one own token, or with ``score`` one after each token that it reads."""
        new, text = self.text.tokens[self.cached :], self.text
        if text.prompt_len:
            params = SamplingParams(temperature=text.temperature, top_k=CANDIDATES, seed=self.seed)
        else:
            params = SamplingParams(temperature=1.0, top_k=CANDIDATES, min_p=PROMPT_MIN_P, seed=self.seed)
        return Row(self.cache, self.cached, new, len(new) if score else 1, params)

    def advance(self, token: int, turns: Turns, max_len: int) -> bool:
        """Append the token that a pass picked; returns whether the text continues."""
        text, ended = self.text, token in turns.ends
        self.cached = len(text.tokens)
        if self.cached >= max_len or (ended and text.prompt_len):
            return False
        text.tokens += turns.answering if ended else [token]
        if ended:
            text.prompt_len = len(text.tokens)
        return True
