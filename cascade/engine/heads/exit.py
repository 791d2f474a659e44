"""Early exit and skipped layers: a model drafts for itself with some of its own layers, its norm and its head.

    h = embedding;  h = layer_i(h) for each layer i that is run;  logits = head(norm(h))

The first E layers are those of LayerSkip (arXiv 2404.16710), any others those of Draft & Verify (arXiv 2309.08168) and SWIFT
(arXiv 2410.06916). Keys and values of the text are the model's, which is where they are; those of guesses lie in the same
layers after the text, and the next pass writes over them. So nothing is kept, no hidden state is read, and what a store goes
through needs no code here. Where only the first layers are run, guesses are those of a model that has no others.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cascade.draft import Draft
from cascade.engine.heads.guesses import Guesses, Text
from cascade.engine.heads.head import Head, Place
from cascade.engine.heads.reader import decoder
from cascade.engine.kv import Span
from cascade.errors import ModelError
from cascade.scorer import MAX_FORKED


class Exit(Head):
    """Runs the layers of ``network`` that are not skipped; raises `ModelError` if they are not found."""

    kind = "exit"
    reads = ()
    width = 0
    most = MAX_FORKED - 1  # the text's last token is read, too

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__(int(network.get_input_embeddings().weight.shape[0]))
        self._network = (network,)  # a tuple: its modules stay the model's
        try:
            self._shape = Shape(decoder(network)[1][0])
        except ModelError as error:
            raise ModelError(f"The drafter 'exit' cannot be used: {error}") from None
        self.skip(())

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return len(decoder(self._network[0])[1])

    def skip(self, layers: Collection[int]) -> None:
        """Run all layers but these from now on."""
        self.skipped = frozenset(layers)
        self._view = (without(self._network[0], self.skipped, self._shape),)
        self.cost = _size(self._view[0]) / _size(self._network[0])

    def draft(self, texts: Sequence[Text], place: Place) -> list[Draft]:
        guesses = Guesses(texts)
        active = [number for number, text in enumerate(texts) if text.guesses]
        if active:
            with place.rooms([texts[number]._replace(guesses=texts[number].guesses + 1) for number in active]) as rooms:
                roomy = {one: room for one, room in zip(active, rooms, strict=True) if room is not None}
                self._go_on(guesses, roomy, place)
        return guesses.drafts()

    def _go_on(self, guesses: Guesses, rooms: Mapping[int, Any], place: Place) -> None:
        """Guess after each text that has a room, and after its guesses."""
        active, texts = list(rooms), guesses.texts
        device = self._network[0].device
        tokens = torch.tensor([texts[one].tokens[-1] for one in active]).to(device, non_blocking=True)
        while active:
            last = [texts[one].end - 1 + guesses.step for one in active]
            spans = [Span(rooms[one], row, row + 1, start) for row, (one, start) in enumerate(zip(active, last, strict=True))]
            chosen = guesses.choose(active, self._pass(tokens, last, place, spans))
            kept = [row for row, one in enumerate(active) if texts[one].guesses > guesses.step]
            active, tokens = [active[row] for row in kept], chosen[kept]

    def _pass(self, tokens: Tensor, positions: Sequence[int], place: Place, spans: Sequence[Span]) -> Tensor:
        """Logits ``[n, vocab_size]`` after each token."""
        where, planned = torch.tensor(positions).to(tokens.device, non_blocking=True), place.plan(spans)
        if place.written_out is not None:
            return place.written_out(tokens, where, torch.arange(len(tokens)), planned, skip=self.skipped)[0]
        out: Tensor = self._view[0](
            input_ids=tokens[None], position_ids=where[None], use_cache=False, cascade_pass=planned
        ).logits[0]
        return out

    def first(self, text: Text, place: Place) -> Tensor:
        ids = torch.tensor(text.tokens).to(self._network[0].device)
        logits = self._pass(ids, range(text.end), place, [Span(text.store, 0, text.end, 0)])
        return logits[1:].argmax(-1)


def _size(network: PreTrainedModel) -> int:
    """Numbers that a pass of one token reads, but for experts that are not chosen."""
    embedding, head = network.get_input_embeddings().weight, network.get_output_embeddings().weight
    read: int = sum(weight.numel() for weight in network.parameters())
    return read if embedding is head else read - int(embedding.numel())


class Shape:
    """What the layers of a model return: hidden states, or a tuple that begins with them. Seen in the model's own passes."""

    def __init__(self, layer: nn.Module) -> None:
        self.size = 0  # of the tuple
        self._hook = layer.register_forward_hook(self._note)

    def _note(self, layer: nn.Module, given: object, out: object) -> None:
        self.size = len(out) if isinstance(out, tuple) else 0
        self._hook.remove()

    def of(self, hidden: Tensor) -> object:
        return (hidden, *[None] * (self.size - 1)) if self.size else hidden


class Skipped(nn.Module):
    """In the place of a layer; to all who ask what kind it is, it is that layer."""

    def __init__(self, layer: nn.Module, shape: Shape) -> None:
        super().__init__()
        self._layer = (layer,)
        self._shape = shape

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_layer"][0], name)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> object:
        return self._shape.of(hidden_states)


def without(network: PreTrainedModel, skipped: Collection[int], shape: Shape) -> PreTrainedModel:
    """The same network, module by module, but for some layers; it has no weights of its own."""
    owner, layers = decoder(network)
    path = next(name for name, module in network.named_modules() if module is owner).split(".")
    left = nn.ModuleList(Skipped(layer, shape) if number in skipped else layer for number, layer in enumerate(layers))
    view = at = _alike(network)
    for name in filter(None, path):
        at._modules[name] = _alike(getattr(at, name))
        at = getattr(at, name)
    name = next(name for name, module in owner.named_children() if module is layers)
    at._modules[name] = left
    return view


def _alike(module: Any) -> Any:
    """A module with the same parts, which may be exchanged."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other
