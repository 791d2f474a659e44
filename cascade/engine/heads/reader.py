"""A head beside a model: hidden states are noted as a pass computes them, and kept with the keys and values of the sessions.

What a head keeps are layers of the same stores, after the model's: its own keys and values, and in one that nobody attends to
the states that it reads. So all that happens to a store, be it rolled back, shared, forked, joined or freed, happens to
them. They are exact as far as the text before a row, but for one position: where a row begins at the first position of a
fork, the entry before it belongs to another text, whose next token is another one.
A head guesses a little worse then.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cascade.cpu.cache import BlockedFork
from cascade.draft import Draft
from cascade.engine.heads.guesses import Text
from cascade.engine.heads.head import Head
from cascade.engine.network.attention import Attention, Scoring, Span
from cascade.engine.network.contiguous import Fork
from cascade.engine.network.llama import Llama
from cascade.engine.network.survey import Survey
from cascade.errors import ModelError
from cascade.scorer import MAX_FORKED, UNREAD, Row, Scored


class Reader:
    """Serves ``head`` beside ``network``; raises `ModelError` if the head reads what the network does not have."""

    def __init__(self, head: Head, network: PreTrainedModel) -> None:
        self.head = head
        self._network = network
        self._hidden: dict[int, Tensor] = {}  # of the last pass, `[1, n, hidden_size]`
        self._kept = 0  # layer of the states
        self._dtype = network.dtype  # of the states
        self.written_out: Llama | None = None  # the model, where it is ours
        self._attention: Attention | None = None
        self._windows: dict[int, int | None] = {}
        for layer in sorted(set(head.reads)):
            self._hook(layer)

    def _hook(self, layer: int) -> None:
        """Note a hidden state: what a layer is given, or after the last one what the layers' owner returns."""
        owner, layers = decoder(self._network)
        if not 0 <= layer <= len(layers):
            raise ModelError(f"it reads hidden state {layer} of a model that has {len(layers)} layers")

        def note_given(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._hidden[layer] = given[0] if given else named["hidden_states"]

        def note_returned(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            self._hidden[layer] = out[0]

        if layer == len(layers):
            owner.register_forward_hook(note_returned)
        else:
            layers[layer].register_forward_pre_hook(note_given, with_kwargs=True)

    def renew(self, head: Head) -> None:
        """Go on with ``head``, of the same kind and shape, between two passes; raises `ModelError` if it is another."""
        shapes, others = ({name: part.shape for name, part in one.state_dict().items()} for one in (head, self.head))
        if shapes != others or head.known != self.head.known or head.reads != self.head.reads:
            raise ModelError(
                "the head has another shape, reads other states or knows other tokens than the one that it replaces"
            )
        for old, new in zip(self.head.own_layers, head.own_layers, strict=True):
            new.self_attn.layer_idx = old.self_attn.layer_idx
        self.head = head

    # as a part of the model

    def add_layers(self, found: Survey) -> None:
        """Number the head's layers after the model's and add them to what was found of these."""
        first = 1 + max(found.windows)
        self.head.number(first)
        for layer, heads in enumerate(self.head.attends, first):
            found.windows[layer], found.heads[layer] = None, heads
        found.windows.update(enumerate(self.head.windows, first))
        self._kept = first + len(self.head.attends)
        if self.head.width:
            found.kept[self._kept] = self.head.width

    def attach(self, attention: Attention, windows: dict[int, int | None], written_out: Llama | None) -> None:
        """Take the way in which keys and values are held, and the network that runs passes if it is ours."""
        self._attention, self._windows, self.written_out = attention, windows, written_out

    def record(self, hidden: Mapping[int, Tensor]) -> None:
        """Take the hidden states of the last pass, ``[n, hidden_size]`` each, where no module of the network ran."""
        self._hidden.update((layer, states[None]) for layer, states in hidden.items())

    def finish_pass(self, spans: Sequence[Span], planned: Any) -> None:
        """Keep what the head reads of the pass that has run, for its ``spans``: none if no row is read."""
        hidden = [self._hidden[layer][0] for layer in self.head.reads] if spans else []
        self._hidden.clear()
        if spans:
            self.head.keep(hidden, spans, planned, self)

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row], scored: Sequence[Scored]) -> list[Scored]:
        """Let the head read the rows of a pass and their own tokens, and guess after the rows that ask for it."""
        drafts: list[Draft | None] = [None] * len(rows)
        texts = [self._text(row, result) for row, result in zip(rows, scored, strict=True)]
        places = [place for place, text in enumerate(texts) if text is not None]
        if places:
            found = self.head.draft([text for text in texts if text is not None], self)
            for place, draft in zip(places, found, strict=True):
                drafts[place] = draft
        return [replace(result, draft=draft) if draft else result for result, draft in zip(scored, drafts, strict=True)]

    def _text(self, row: Row, scored: Scored) -> Text | None:
        """The end of a row's text after the pass, if the head reads it; a fork only where nothing of its row was wrong."""
        if row.guesses == UNREAD:
            return None
        new = row.draft.walk(scored.own)[0] if row.num_own == 1 and scored.own else []
        wanted = min(row.guesses, self.head.most) if new else 0
        text = Text(row.cache, row.start, [*row.tokens, *new], wanted, row.params, row.state, len(new))
        if not isinstance(row.cache, Fork | BlockedFork):
            return text
        return text._replace(guesses=0) if new and text.end == row.start + len(row.input_ids) + 1 else None

    # what heads ask for

    def keep(self, spans: Sequence[Span], states: Tensor) -> None:
        """Keep ``[n, width]`` of what a pass has read; see `Head.state`."""
        self._dtype = states.dtype  # a store may hold them in another one
        for span in spans:
            span.cache.put(self._kept, span.start, states[span.begin : span.end])

    def states(self, spans: Sequence[Span]) -> Tensor:
        """What was kept of these positions, one after another, ``[n, width]``."""
        kept = [span.cache.get(self._kept, span.positions.start, span.positions.stop) for span in spans]
        return torch.cat(kept).to(self._dtype)

    def plan(self, spans: Sequence[Span]) -> Any:
        """What `attend` is given for rows that write and see the head's keys and values."""
        assert self._attention is not None
        return self._attention.plan(spans, self._windows)

    def write(self, module: nn.Module, key: Tensor, value: Tensor, planned: Any) -> None:
        """Store ``[1, kv_heads, n, head_dim]`` in the layer ``module.layer_idx``, for later queries."""
        planned.write(int(module.layer_idx), key, value)  # type: ignore[arg-type]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, planned: Any) -> Tensor:
        """Attention ``[1, n, heads, head_dim]`` of ``[1, heads, n, head_dim]`` in the layer ``module.layer_idx``."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        return planned.attend(layer, query, key, value, Scoring(query.shape[3] ** -0.5))

    @contextmanager
    def guess_stores(self, texts: Sequence[Text]) -> Iterator[list[Any]]:
        """Stores for keys and values of the guesses after each text, but the last one's.

        The session's own store where it has memory after the text, or else a fork.
        """
        stores: list[Any] = []
        forks: list[Any] = []
        try:
            for text in texts:
                begin, store = text.end - 1, text.store
                end = begin + min(text.guesses - 1, MAX_FORKED)
                if end > max(begin, store.capacity):
                    store = store.fork(begin)
                    forks.append(store)
                stores.append(store)
            yield stores
        finally:
            for fork in forks:
                fork.free()


def decoder(network: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The module that applies the layers of a model, and these in their order; raises `ModelError` if they are not found."""
    number = network.config.get_text_config().num_hidden_layers
    for owner in network.base_model.modules() if network.base_model is not network else ():
        for layers in owner.children():
            if isinstance(layers, nn.ModuleList) and len(layers) == number:
                return owner, layers
    raise ModelError(f"the layers of {type(network).__name__} are not found")
