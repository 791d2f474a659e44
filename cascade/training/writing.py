"""Conversations that a model writes by itself: the text a draft model is trained on.

After the beginning of a user's turn a chat model writes the turn as well, and then answers it (Magpie, Xu et al., arXiv
2406.08464). So prompts come from the model, like those it was tuned on, and no data are needed. A base model has no turns: it
writes on from its start token.

All rows advance by one token a step. A row that ends begins anew at once, so the batch stays full.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, PreTrainedTokenizerBase

ATTENTION = "cascade_writing"
USERS_TEXT = "\ue000"  # a private character, which no template has: marks where the user's text stands
CANDIDATES = 64  # the likeliest tokens, one of which is sampled
PROMPT_MIN_P = 0.1  # of user's turns: keeps them sensible at temperature 1
TEMPERATURES = (0.0, 0.7, 1.0)  # of answers, in turn
STARTS = (  # of user's turns: half are the model's own from the first word on, the others make sure of what is asked often
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
    """Token ids around what a model writes in a conversation of one question and one answer."""

    opening: tuple[int, ...]  # up to the user's text; the start token for a base model
    answering: tuple[int, ...]  # between the user's text and the answer; none for a base model
    ends: frozenset[int]  # tokens that end a turn
    starts: tuple[tuple[int, ...], ...] = ((),)  # of user's turns

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> "Turns":
        """Of the tokenizer's chat template; ``ends`` are the model's end tokens. Without turns, of the start token."""
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else ends[0]
        base = cls((int(start),), (), frozenset(ends))
        if not tokenizer.chat_template:
            return base
        asked = [{"role": "user", "content": USERS_TEXT}]
        text = str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
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
    """One text: its token ids, how many of them stand before the answer, and the temperature of the answer."""

    tokens: list[int]
    prompt_len: int
    temperature: float
    forced: list[int] = field(default_factory=list)  # tokens that come next, in reverse, whatever the model says

    def advance(self, sampled: int, turns: Turns, max_len: int) -> bool:
        """Take the next token; returns whether the text is at its end."""
        if self.forced:
            self.tokens.append(self.forced.pop())
            return len(self.tokens) >= max_len
        if sampled in turns.ends and not self.prompt_len:
            self.forced = list(reversed(turns.answering))
            self.tokens.append(self.forced.pop())
            self.prompt_len = len(self.tokens) + len(self.forced)
            return self.prompt_len >= max_len
        self.tokens.append(sampled)
        return sampled in turns.ends or len(self.tokens) >= max_len

    @property
    def answered(self) -> bool:
        return 0 < self.prompt_len < len(self.tokens)

    @property
    def sampled_at(self) -> tuple[float, float]:
        """Temperature and min-p of the next token."""
        return (self.temperature, 0.0) if self.prompt_len else (1.0, PROMPT_MIN_P)


def own_prompts(turns: Turns, skip: int = 0) -> Iterator[Written]:
    """Beginnings of conversations whose user's turn is the model's own, without end; the first ``skip`` are left out."""
    number = skip
    while True:
        start = turns.starts[number // len(TEMPERATURES) % len(turns.starts)]
        first, *rest = (*turns.opening, *start)
        begun = 0 if turns.answering else 1  # a base model answers from its start token on
        yield Written([first], begun, TEMPERATURES[number % len(TEMPERATURES)], rest[::-1])
        number += 1


def given_prompts(prompts: Iterator[Sequence[int]]) -> Iterator[Written]:
    """Beginnings of conversations whose prompts are given: only the answers are written."""
    for number, tokens in enumerate(prompts):
        first, *rest = tokens
        yield Written([first], len(tokens), TEMPERATURES[number % len(TEMPERATURES)], rest[::-1])


@torch.inference_mode()
def write(
    network: PreTrainedModel, turns: Turns, beginnings: Iterator[Written], *, rows: int = 128, max_len: int = 512, seed: int = 0
) -> Iterator[Written]:
    """Texts of at most ``max_len`` tokens as they end, ``rows`` of them written at a time, until no beginning is left.

    Those that were cut off are among them if their answer had begun.
    """
    generator, implementation = torch.Generator().manual_seed(seed), network.config._attn_implementation
    texts = [text for text, _ in zip(beginnings, range(rows), strict=False)]
    cache = _Cache(len(texts), max_len, network.device)
    network.set_attn_implementation(ATTENTION)
    try:
        while texts:
            ids = torch.tensor([[text.tokens[-1]] for text in texts], device=network.device)
            cache.positions = torch.tensor([len(text.tokens) - 1 for text in texts], device=network.device)
            logits = network(ids, position_ids=cache.positions[:, None], use_cache=False, writing=cache).logits[:, -1]
            kept = []
            for row, token in enumerate(_sample(logits, [text.sampled_at for text in texts], generator)):
                text: Written | None = texts[row]
                if texts[row].advance(token, turns, max_len):
                    if texts[row].answered:
                        yield texts[row]
                    text = next(beginnings, None)
                if text is not None:
                    texts[row] = text
                    kept.append(row)
            if len(kept) < len(texts):
                texts = [texts[row] for row in kept]
                cache.keep(kept)
    finally:
        network.set_attn_implementation(implementation)


def _sample(logits: Tensor, sampled_at: Sequence[tuple[float, float]], generator: torch.Generator) -> list[int]:
    """A token of each row of ``logits`` ``[rows, vocab]`` among its likeliest ones."""
    top, ids = logits.topk(min(CANDIDATES, logits.shape[-1]), -1)
    temperature, min_p = torch.tensor(sampled_at).T
    probabilities = (top.float().cpu() / temperature.clamp_min(1e-4)[:, None]).softmax(-1)
    probabilities = probabilities.masked_fill(probabilities < probabilities[:, :1] * min_p[:, None], 0.0)
    chosen = torch.multinomial(probabilities, 1, generator=generator)
    tokens: list[int] = ids.cpu().gather(1, chosen).flatten().tolist()
    return tokens


class _Cache:
    """Keys and values of all rows, ``[rows, heads, positions, head_dim]`` a layer, made when a layer first hands some in."""

    def __init__(self, rows: int, max_len: int, device: torch.device) -> None:
        self._shape = rows, max_len
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.positions = torch.zeros(rows, dtype=torch.long, device=device)  # of each row's new token

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put ``[rows, heads, 1, head_dim]`` at each row's position; returns everything up to the longest row's."""
        rows, max_len = self._shape
        if layer not in self._layers:
            made = [part.new_zeros(rows, part.shape[1], max_len, part.shape[3]) for part in (key, value)]
            self._layers[layer] = (made[0], made[1])
        keys, values = self._layers[layer]
        index, length = torch.arange(len(self.positions), device=key.device), int(self.positions.max()) + 1
        keys[index, :, self.positions] = key[:, :, 0]
        values[index, :, self.positions] = value[:, :, 0]
        return keys[:, :, :length], values[:, :, :length]

    def keep(self, rows: Sequence[int]) -> None:
        self._layers = {layer: (keys[list(rows)], values[list(rows)]) for layer, (keys, values) in self._layers.items()}
        self._shape = len(rows), self._shape[1]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    writing: _Cache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token a row to all tokens of that row."""
    assert writing is not None
    keys, values = writing.store(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    grouped = query.squeeze(2).unflatten(
        1, (keys.shape[1], -1)
    )  # [rows, kv heads, group, head_dim]: a group reads the same keys
    seen = torch.arange(keys.shape[2], device=keys.device) <= writing.positions[:, None]
    out = nn.functional.scaled_dot_product_attention(grouped, keys, values, seen[:, None, None], scale=scaling)
    return out.flatten(1, 2)[:, None], None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
