"""Conversations that a model writes by itself: the text that draft models are trained on.

A chat model that is given the opening of a user's turn writes that turn too, and then answers it (Magpie, Xu et al., arXiv
2406.08464). So prompts come from the model, like those it was tuned on, and no data are needed. A base model has no turns: it
continues its start token.

Many texts are written at once, all at the same position: no row is padded, attention needs no mask, and nothing is read back
from the device but ended texts. What is known of a text already, such as a given prompt, is read in place of what is sampled.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward

USERS_TEXT = "\ue000"  # stands for the user's text: a private character, which no template has
CANDIDATES = 64  # likeliest tokens that are sampled from
PROMPT_MIN_P = 0.1  # of users' turns: keeps them sensible at temperature 1
TEMPERATURES = (0.0, 0.7, 1.0)  # of answers, in turn
GROWTH = 64  # positions that a cache grows by
CHECKED = 32  # positions after which ended texts are read back
STARTS = (  # of users' turns: half are the model's own from the first word on, the others cover frequent tasks
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
    starts: tuple[tuple[int, ...], ...] = ((),)  # of user's turns

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> "Turns":
        """From the tokenizer's chat template, or the start token if it has no turns; ``ends`` are the model's end tokens."""
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


@dataclass(frozen=True, slots=True)
class Written:
    """One text: its token ids, the number of them before the answer (0 if the model writes the prompt), and the answer's
    temperature."""

    tokens: list[int]
    prompt_len: int
    temperature: float

    @property
    def answered(self) -> bool:
        return 0 < self.prompt_len < len(self.tokens)


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
    network: PreTrainedModel,
    turns: Turns,
    beginnings: Iterable[Written],
    *,
    rows: int = 128,
    max_len: int = 512,
    seed: int = 0,
) -> Iterator[Written]:
    """Write ``rows`` texts at a time, and yield each when it ends, until no beginning is left.

    A text has at most ``max_len`` tokens. One that is cut off is yielded only if its answer had begun.
    """
    network.set_attn_implementation(STORED)
    noise, beginnings = torch.Generator(network.device).manual_seed(seed), iter(beginnings)
    while batch := list(islice(beginnings, rows)):
        yield from _together(network, turns, batch, max_len, noise)


@torch.inference_mode()
def _together(
    network: PreTrainedModel, turns: Turns, beginnings: Sequence[Written], max_len: int, noise: torch.Generator
) -> Iterator[Written]:
    rows = _Rows.of(turns, beginnings, max_len, network.device)
    store = _Store()
    fed, position = 0, int(rows.known.min())
    while position < max_len and len(rows.known):
        ids = rows.tokens[:, fed:position]
        places = torch.arange(fed, position, device=ids.device)[None]
        said = network(ids, position_ids=places, store=store, use_cache=False, logits_to_keep=1)
        rows.extend(position, sampled(said.logits[:, -1].float(), rows.prompt_len == 0, rows.temperature, noise))
        fed, position = position, position + 1
        if position % CHECKED == 0 or position == max_len:
            ended = torch.ones_like(rows.length, dtype=torch.bool) if position == max_len else rows.length < max_len
            yield from (text for text in rows.texts(ended) if text.answered)
            if bool(ended.any()):
                rows.keep(left := (~ended).nonzero()[:, 0])
                store.keep(left)


def sampled(logits: Tensor, prompt: Tensor, temperature: Tensor, noise: torch.Generator) -> Tensor:
    """The next token of each row, int64 ``[rows]``, from ``logits`` float32 ``[rows, vocab_size]``.

    Where ``prompt`` is true it is of a user's turn: temperature 1, and no token far less likely than the likeliest.
    """
    top, ids = logits.topk(min(CANDIDATES, logits.shape[-1]), -1)
    top = top.masked_fill(prompt[:, None] & (top < top[:, :1] + math.log(PROMPT_MIN_P)), -torch.inf)
    scale = torch.where(prompt, 1.0, temperature)[:, None]
    # Gumbel noise is -log of exponential noise; scaled rather than the logits, so that temperature 0 is no special case
    chosen = (top - scale * torch.empty_like(top).exponential_(generator=noise).log()).argmax(-1, keepdim=True)
    return ids.gather(1, chosen)[:, 0]


@dataclass(slots=True)
class _Rows:
    """Texts that are being written, on the network's device."""

    turns: Turns
    tokens: Tensor  # int64 [rows, max_len + room for the tokens between turns]
    known: Tensor  # int64 [rows]: tokens that are given or written
    prompt_len: Tensor  # int64 [rows]: as in `Written`
    length: Tensor  # int64 [rows]: of texts that ended; max_len of others
    temperature: Tensor  # float32 [rows]
    ends: Tensor  # int64: tokens that end a turn

    @classmethod
    def of(cls, turns: Turns, beginnings: Sequence[Written], max_len: int, device: torch.device) -> "_Rows":
        tokens = torch.zeros(len(beginnings), max_len + len(turns.answering), dtype=torch.int64)
        for row, text in zip(tokens, beginnings, strict=True):
            row[: len(text.tokens)] = torch.tensor(text.tokens[: len(row)])
        known = torch.tensor([len(text.tokens) for text in beginnings])
        return cls(
            turns,
            tokens.to(device),
            known.to(device),
            torch.tensor([text.prompt_len for text in beginnings], device=device),
            torch.full_like(known, max_len).to(device),
            torch.tensor([text.temperature for text in beginnings], device=device),
            torch.tensor(sorted(turns.ends), device=device),
        )

    def extend(self, place: int, sampled: Tensor) -> None:
        """Put what is known of each text at ``place`` there, or what was sampled for it."""
        given, writes_prompt = place < self.known, self.prompt_len == 0
        ended = ~given & torch.isin(sampled, self.ends)
        self.tokens[:, place] = torch.where(given, self.tokens[:, place], sampled)
        asked = ended & writes_prompt
        for offset, token in enumerate(self.turns.answering):
            self.tokens[:, place + offset] = torch.where(asked, token, self.tokens[:, place + offset])
        self.known = torch.where(asked, place + len(self.turns.answering), self.known.clamp_min(place + 1))
        self.prompt_len = torch.where(asked, self.known, self.prompt_len)
        self.length = torch.where(ended & ~writes_prompt, self.length.clamp_max(place + 1), self.length)

    def texts(self, chosen: Tensor) -> Iterator[Written]:
        columns: Sequence[Any] = (self.tokens, self.length, self.prompt_len, self.temperature)
        for tokens, length, prompt_len, temperature in zip(*(part[chosen].tolist() for part in columns), strict=True):
            yield Written(tokens[:length], prompt_len, round(temperature, 6))

    def keep(self, chosen: Tensor) -> None:
        for name in ("tokens", "known", "prompt_len", "length", "temperature"):
            setattr(self, name, getattr(self, name)[chosen])


class _Store:
    """Keys and values of all layers; the attention function appends to them."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor, int]] = {}  # each with room for more positions, and how many are filled

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all positions, ``[rows, heads, n, head_dim]``, after those of new ones have been appended."""
        keys, values, held = self._layers.get(layer) or (key[:, :, :0], value[:, :, :0], 0)
        end = held + key.shape[2]
        if end > keys.shape[2]:
            keys, values = (_longer(part, end + GROWTH) for part in (keys, values))
        keys[:, :, held:end], values[:, :, held:end] = key, value
        self._layers[layer] = keys, values, end
        return keys[:, :, :end], values[:, :, :end]

    def keep(self, rows: Tensor) -> None:
        for layer, (keys, values, held) in self._layers.items():
            self._layers[layer] = keys[rows], values[rows], held


def _longer(part: Tensor, length: int) -> Tensor:
    room = part.new_empty(*part.shape[:2], length, part.shape[3])
    room[:, :, : part.shape[2]] = part
    return room


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, store: _Store, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, query, *store.append(module.layer_idx, key, value), *args, **kwargs)


STORED = "cascade_stored"
AttentionInterface.register(STORED, _attend)
AttentionMaskInterface.register(STORED, lambda *args, **kwargs: None)
