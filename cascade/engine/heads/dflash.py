"""DFlash: a few layers that guess a whole block of tokens at once.

A block is the last token of the text and masks after it. Its layers see the whole block and, of the text before it, keys and
values that are made of the model's hidden states:

    c = norm(fc(hidden states));  keys, values of a position = those that each layer makes of c
    x = embeddings of the block;  x = layers(x), which attend to these and to the block;  logits = verifier's head(norm(x))

In a layer whose block is not causal all its places see the same positions: they are further heads of one query at its end, so
that attention over stores, which is causal, needs no other kind of mask.

As published, beside ``fc``, ``hidden_norm``, ``layers.{l}.*`` as of Qwen 3, ``norm``, and maybe a file with what masks are
embedded as:

- z-lab: ``dflash_config.{target_layer_ids, mask_token_id}``, ``block_size`` there or at the top level. Ids are of layers whose
  outputs are read. The first token of a block is known: the others are guesses.
- ``speculators``: sizes of layers in ``transformer_layer_config``, ``aux_hidden_state_layer_ids`` that count as Transformers
  does, and ``sample_from_anchor`` for what a place guesses.

Layers may slide (``layer_types``, ``sliding_window``, ``dflash_config.{use_swa, swa_window_size, causal}``): as vLLM takes
them, those that ``layer_types`` names see no later place of their block, unless something says otherwise.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from cascade.draft import Draft
from cascade.engine.heads.checkpoint import Checkpoint
from cascade.engine.heads.eagle import Angles, Attention, Layer
from cascade.engine.heads.guesses import Guesses, Text
from cascade.engine.heads.head import Head, Verifier, where
from cascade.engine.heads.reader import Reader
from cascade.engine.network.attention import Span
from cascade.scorer import MAX_FORKED

SLIDING = "sliding_attention"
MARKOV = ("markov_head.", "confidence_head.")  # begin tensors that DSpark alone has


@dataclass(frozen=True, slots=True)
class Seen:
    """What a place of a block sees in a layer."""

    causal: bool = False  # of its block, those before it and itself alone
    window: int | None = None  # positions that slide, if they do: its own and those before it, or those before the block


@dataclass(frozen=True, slots=True)
class Layout:
    size: int  # places, of which the first has the last token of the text
    mask: int  # token id of the others
    shifted: bool  # a place guesses the token after it, and not its own
    seen: tuple[Seen, ...]  # by layer

    @property
    def guesses(self) -> int:
        return self.size if self.shifted else self.size - 1


class BlockAttention(Attention):
    """Of a layer: queries are a block's, keys and values the text's, too."""

    def __init__(self, config: LlamaConfig, seen: Seen, names: Collection[str]) -> None:
        super().__init__(config, config.hidden_size, names)
        self.seen = seen

    def context(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys and values ``[1, kv_heads, n, head_dim]`` of ``[n, hidden_size]``."""
        key = self.heads_of(x, self.k_proj, self.k_norm)
        return apply_rotary_pos_emb(key, key[:, :0], *angles)[0], self.heads_of(x, self.v_proj)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, reader: Reader, planned: Any) -> Tensor:
        """Of the places of blocks; ``planned`` is for all of these, for the last of each, and their number in a block."""
        whole, ends, size = planned
        if self.seen.causal:
            return reader.attend(self, query, key, value, whole)
        reader.write(self, key, value, whole)
        # heads of all places are further heads of the last one
        last_key, last_value = (part.unflatten(2, (-1, size))[:, :, :, -1] for part in (key, value))
        folded = query.unflatten(2, (-1, size)).transpose(2, 3).flatten(1, 2)
        out: Tensor = (
            reader.attend(self, folded, last_key, last_value, ends).unflatten(2, (-1, size)).transpose(2, 3).flatten(1, 2)
        )
        return out


class DFlash(Head):
    """Guesses of a block are made beside each other: none knows the others."""

    kind = "dflash"
    follows = False  # upon each other, as guesses of DSpark do
    shifted = False  # see `Layout.shifted`: what its blocks are where their configuration does not say it

    def __init__(
        self,
        config: LlamaConfig,
        verifier: Verifier,
        layout: Layout,
        names: Collection[str] = (),
        *,
        reads: Sequence[int],
        ids: Tensor | None = None,
    ) -> None:
        """``reads`` are hidden states, and ``names`` those tensors that not every such head has."""
        super().__init__(verifier.vocab_size, ids)
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.config, self.layout, self.reads, self.width = config, layout, tuple(reads), 0
        self.most = layout.guesses
        self.fc = nn.Linear(len(reads) * verifier.hidden_size, size, bias="fc.bias" in names)
        self.hidden_norm, self.norm = LlamaRMSNorm(size, epsilon), LlamaRMSNorm(size, epsilon)
        self.layers = nn.ModuleList(Layer(config, BlockAttention(config, seen, names)) for seen in layout.seen)
        self.embed_with(verifier, names, size)
        self._own_mask = "mask_embedding" in names
        if self._own_mask:
            self.mask_embedding = nn.Parameter(torch.empty(size))
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim)
        self.attends = tuple((heads[0] if seen.causal else heads[0] * layout.size, *heads[1:]) for seen in layout.seen)
        # the only query of a block whose places see all of it lies at its end
        past = [0 if seen.causal else layout.size for seen in layout.seen]
        self.windows = tuple(seen.window and seen.window + more for seen, more in zip(layout.seen, past, strict=True))
        with torch.device("cpu"):  # frequencies are never in 16 bits
            self._rotary = (LlamaRotaryEmbedding(config).to(verifier.embed.weight.device),)

    @classmethod
    def fits(cls, checkpoint: Checkpoint) -> bool:
        weights = checkpoint.weights
        if checkpoint.query_width != 1 or not {"hidden_norm.weight", "layers.0.input_layernorm.weight"} & weights.keys():
            return False
        return any(name.startswith(MARKOV) for name in weights) == cls.follows

    @classmethod
    def of(cls, checkpoint: Checkpoint, verifier: Verifier, **options: Any) -> "DFlash":
        layout = _layout(checkpoint, verifier, shifted=cls.shifted or "DSpark" in str(checkpoint.config.get("architectures")))
        checkpoint.check_vocab(verifier)
        names = checkpoint.own_names(verifier)
        checkpoint.check_embedded(["embed_tokens.weight", "lm_head.weight"], names, verifier)
        reads = _reads(checkpoint, verifier)
        number, rest = divmod(inputs := checkpoint.size("fc.weight", 1), len(reads))
        if rest:
            raise checkpoint.wrong(
                f"its tensor fc.weight takes {inputs} numbers, and its config names {len(reads)} hidden states"
            )
        checkpoint.check_hidden(number, verifier)
        ids = None
        if "lm_head.weight" in names:
            ids = checkpoint.token_ids("d2t", checkpoint.size("lm_head.weight"), verifier, offsets=True)
        return cls(checkpoint.llama(verifier), verifier, layout, names, reads=reads, ids=ids, **options)

    # of the text

    def state(self, hidden: Sequence[Tensor]) -> Tensor:
        """What keys and values are made of, ``[n, hidden_size]``; it is not kept."""
        return self.hidden_norm(self.fc(torch.cat(list(hidden), dim=-1)))

    def keep(self, hidden: Sequence[Tensor], spans: Sequence[Span], planned: Any, reader: Reader) -> None:
        positions = where(spans, self.fc.weight.device)
        states = self.state([part[: positions.shape[1]] for part in hidden])
        angles = self._rotary[0](states, positions)
        for layer in self.own_layers:
            key, value = layer.self_attn.context(states, angles)
            reader.write(layer.self_attn, key, value, planned)

    # of blocks

    def _embedded(self, last: Tensor) -> Tensor:
        """Blocks ``[blocks, size, hidden_size]``."""
        ids = last.new_full((len(last), self.layout.size), 0 if self._own_mask else self.layout.mask)
        ids[:, 0] = last
        embedded: Tensor = self.embed(ids)
        if self._own_mask:
            embedded = torch.cat([embedded[:, :1], self.mask_embedding.expand(len(last), self.layout.size - 1, -1)], dim=1)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the tokens it knows, ``[..., tokens]``, of ``[..., hidden_size]``."""
        return self.project(hidden)

    def draft(self, texts: Sequence[Text], reader: Reader) -> list[Draft]:
        found = [Draft()] * len(texts)
        asking = [number for number, text in enumerate(texts) if text.guesses]
        if asking:
            with reader.guess_stores([texts[number]._replace(guesses=self.layout.size + 1) for number in asking]) as stores:
                drafts = self._draft_blocks([texts[number] for number in asking], stores, reader)
            for number, draft in zip(asking, drafts, strict=True):
                found[number] = draft
        return found

    def _draft_blocks(self, texts: Sequence[Text], stores: Sequence[Any], reader: Reader) -> list[Draft]:
        """Guesses after texts, in ``stores`` for a block from their last token on."""
        size, starts = self.layout.size, [text.end - 1 for text in texts]
        blocks = [Span(store, row * size, (row + 1) * size, starts[row]) for row, store in enumerate(stores)]
        whole = reader.plan(blocks)
        ends = reader.plan([Span(store, row, row + 1, starts[row] + size - 1) for row, store in enumerate(stores)])
        last = torch.tensor([text.tokens[-1] for text in texts]).to(self.fc.weight.device, non_blocking=True)
        x = self._embedded(last).flatten(0, 1)
        angles = self._rotary[0](x, where(blocks, x.device))
        for layer in self.own_layers:
            x = layer(layer.input_layernorm(x), x, angles, reader, (whole, ends, size))
        out: Tensor = self.norm(x).unflatten(0, (len(texts), size))
        return self.guesses_of(out if self.layout.shifted else out[:, 1:], texts)

    def guesses_of(self, hidden: Tensor, texts: Sequence[Text]) -> list[Draft]:
        """Guesses after texts, of ``[texts, guesses, hidden_size]``."""
        guesses, most = Guesses(texts), max(text.guesses for text in texts)
        guesses.choose_all(self.whole(self.logits(hidden[:, :most].flatten(0, 1))).unflatten(0, (len(texts), most)))
        return guesses.drafts()


def _layout(checkpoint: Checkpoint, verifier: Verifier, *, shifted: bool) -> Layout:
    """How the blocks of a configuration are laid out; raises `ModelError` if it lacks something."""
    config, inner = checkpoint.config, _inner(checkpoint)
    size, mask = _first("block_size", config, inner), _first("mask_token_id", config, inner)
    if not isinstance(size, int):
        raise checkpoint.wrong("its config.json does not name block_size")
    if not 2 <= size <= MAX_FORKED:
        raise checkpoint.wrong(f"its block_size is {size}: it must be 2 to {MAX_FORKED}")
    if not isinstance(mask, int) or "mask_embedding" not in checkpoint.weights:
        mask = checkpoint.check_mask(mask, verifier)
    anchored = _first("sample_from_anchor", config, inner)
    if anchored is None and (bonus := _first("dspark_bonus_anchor", config, inner)) is not None:
        anchored = not bonus
    return Layout(size, mask, shifted if anchored is None else bool(anchored), _seen(checkpoint))


def _reads(checkpoint: Checkpoint, verifier: Verifier) -> tuple[int, ...]:
    """Hidden states that a drafter reads, as Transformers counts them."""
    config, num_layers, number = checkpoint.config, verifier.num_layers, checkpoint.count("layers.{}.")
    if (made_for := config.get("num_target_layers")) not in (None, num_layers):
        raise checkpoint.wrong(f"it was made for a model of {made_for} layers, and the model has {num_layers}")
    layers = config.get("aux_hidden_state_layer_ids")
    if layers is None:
        outputs = _first("target_layer_ids", config, _inner(checkpoint))
        if outputs is None:  # evenly from the second one on
            step = (num_layers - 4) / max(1, number - 1)
            outputs = [round(1 + at * step) for at in range(number)] if number > 1 else [num_layers // 2]
        layers = [layer + 1 for layer in outputs]
    return checkpoint.check_reads(layers, verifier)


def _inner(checkpoint: Checkpoint) -> Mapping[str, Any]:
    return checkpoint.config.get("dflash_config") or {}


def _first(name: str, *parts: Mapping[str, Any]) -> Any:
    return next((part[name] for part in parts if part.get(name) is not None), None)


def _seen(checkpoint: Checkpoint) -> tuple[Seen, ...]:
    own, inner, number = checkpoint.layer_config, _inner(checkpoint), checkpoint.count("layers.{}.")
    types: Sequence[str] = own.get("layer_types") or ()
    named = SLIDING in types
    if named and len(types) < number:
        raise checkpoint.wrong(f"its layer_types are {len(types)}, and it has {number} layers")
    sliding = [types[layer] == SLIDING if named else bool(inner.get("use_swa")) for layer in range(number)]
    window = inner.get("swa_window_size") or own.get("sliding_window")
    if any(sliding) and not isinstance(window, int):
        raise checkpoint.wrong("its config.json does not name the sliding_window of its layers")
    causal = inner.get("causal")
    if causal is None and checkpoint.config.get("sliding_window_non_causal"):
        causal = False
    return tuple(Seen(named and slides if causal is None else bool(causal), window if slides else None) for slides in sliding)
