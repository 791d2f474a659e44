"""Early exit and skipped layers: a model drafts for itself with some of its own layers, its norm and its head.

    h = embedding;  h = layer_i(h) for each layer i that is run;  logits = head(norm(h))

The first E layers are those of LayerSkip (arXiv 2404.16710), any others those of Draft & Verify (arXiv 2309.08168) and SWIFT
(arXiv 2410.06916). Keys and values of the text are the model's, which is where they are; those of guesses lie in the same
layers after the text, and the next pass writes over them. So nothing is kept, no hidden state is read, and what a store goes
through needs no code here. Where only the first layers are run, guesses are those of a model that has no others.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cascade.draft import Draft
from cascade.engine.heads.guesses import Guesses, Text
from cascade.engine.heads.head import Head
from cascade.engine.heads.probe import agreement_on, written
from cascade.engine.heads.reader import Reader, decoder
from cascade.engine.network.attention import Span
from cascade.errors import ModelError, reason
from cascade.planner.choice import speedup
from cascade.scorer import MAX_FORKED

if TYPE_CHECKING:
    from cascade.engine.model import Model

log = logging.getLogger(__name__)

REFUSALS = (RuntimeError, TypeError, AttributeError, LookupError, ValueError)  # of networks that do not run in part


class Exit(Head):
    """Runs the layers of ``network`` that are not skipped; raises `ModelError` if they are not found."""

    kind = "exit"
    reads = ()
    width = 0
    most = MAX_FORKED - 1  # the text's last token is read, too

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__(int(network.get_input_embeddings().weight.shape[0]))
        try:
            self._network = (network, decoder(network)[1])  # a tuple: its modules stay the model's
        except ModelError as error:
            raise ModelError(f"The drafter 'exit' cannot be used: {error}") from None
        self._shape = Shape(self._network[1][0])
        self.skip(())

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return len(self._network[1])

    def skip(self, layers: Collection[int]) -> None:
        """Run all layers but these from now on."""
        self.skipped = frozenset(layers)
        network, every = self._network
        skipped = sum(weight.numel() for layer in self.skipped for weight in every[layer].parameters())
        embedding, head = network.get_input_embeddings().weight, network.get_output_embeddings().weight
        unread = 0 if embedding is head else embedding.numel()  # by a pass of one token
        self.cost = 1 - skipped / (sum(weight.numel() for weight in network.parameters()) - unread)

    def draft(self, texts: Sequence[Text], reader: Reader) -> list[Draft]:
        guesses = Guesses(texts)
        active = [number for number, text in enumerate(texts) if text.guesses]
        if active:
            with reader.guess_stores(
                [texts[number]._replace(guesses=texts[number].guesses + 1) for number in active]
            ) as stores:
                self._go_on(guesses, dict(zip(active, stores, strict=True)), reader)
        return guesses.drafts()

    def _go_on(self, guesses: Guesses, stores: Mapping[int, Any], reader: Reader) -> None:
        """Guess after each text, by its number, and after its guesses."""
        active, texts = list(stores), guesses.texts
        device = self._network[0].device
        tokens = torch.tensor([texts[number].tokens[-1] for number in active]).to(device, non_blocking=True)
        while active:
            last = [texts[number].end - 1 + guesses.step for number in active]
            spans = [Span(stores[number], row, row + 1, last[row]) for row, number in enumerate(active)]
            chosen = guesses.choose(active, self._pass(tokens, last, reader, spans))
            kept = [row for row, number in enumerate(active) if texts[number].guesses > guesses.step]
            active, tokens = [active[row] for row in kept], chosen[kept]

    def _pass(self, tokens: Tensor, positions: Sequence[int], reader: Reader, spans: Sequence[Span]) -> Tensor:
        """Logits ``[n, vocab_size]`` after each token."""
        where, planned = torch.tensor(positions).to(tokens.device, non_blocking=True), reader.plan(spans)
        if reader.written_out is not None:
            return reader.written_out(tokens, where, torch.arange(len(tokens)), planned, skip=self.skipped)[0]
        inputs = {"input_ids": tokens[None], "position_ids": where[None]}
        with self._skipping():
            out: Tensor = self._network[0](**inputs, use_cache=False, cascade_pass=planned).logits[0]
        return out

    @contextmanager
    def _skipping(self) -> Iterator[None]:
        """Have the network run without some of its layers. No other pass of the model runs meanwhile."""
        layers = self._network[1]
        held = {number: layers[number] for number in self.skipped}
        for number, layer in held.items():
            layers[number] = Skipped(layer, self._shape)
        try:
            yield
        finally:
            for number, layer in held.items():
                layers[number] = layer


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


# which layers


def select(model: "Model", layers: int | None = None, skip: Collection[int] = ()) -> float:
    """Let the head of ``model``, an `Exit`, run the first ``layers``, or all but ``skip``, or else what pays best.

    That is tried on a text that the model writes, with guesses after each of its tokens, of the layers alone. Returns the
    share that is right; raises `ModelError` if the model has no such layers or does not run in part.
    """
    assert model.reader is not None
    head = model.reader.head
    assert isinstance(head, Exit)
    choices = _choices(head.num_layers, layers, skip)
    text = written(model)
    found: dict[frozenset[int], tuple[float, float]] = {}  # speed over the model alone, and the share that is right
    for choice in choices:
        head.skip(choice)
        try:
            right = agreement_on(model, text)
        except REFUSALS as error:
            raise ModelError(f"The drafter 'exit' cannot be used: the model does not run in part ({reason(error)})") from error
        found[head.skipped] = speedup(right, head.cost), right
    best = max(found, key=found.__getitem__)
    head.skip(best)
    gain, right = found[best]
    run = ", ".join(str(layer) for layer in range(head.num_layers) if layer not in best)
    level = logging.INFO if gain > 1 else logging.WARNING
    log.log(level, "Drafting with layers %s: %.0f %% of the guesses are right, at %.2f of a pass", run, 100 * right, head.cost)
    return right


def _choices(number: int, layers: int | None, skip: Collection[int]) -> Sequence[Collection[int]]:
    """Layers to skip."""
    if layers is not None:
        if layers >= number:
            raise ModelError(f"drafter.layers is {layers}, but the model has {number} layers: name fewer")
        return [range(layers, number)]
    if skip:
        if max(skip) >= number:
            raise ModelError(f"drafter.skip names layer {max(skip)}, but those of the model are 0 to {number - 1}")
        if len(skip) == number:
            raise ModelError(f"drafter.skip names all {number} layers: leave one")
        return [skip]
    if number < 2:
        raise ModelError("The drafter 'exit' cannot be used: the model has one layer, and nothing is left without it")
    return candidates(number)


def candidates(number: int) -> list[range]:
    """The end, a piece of the middle, or every other layer: what skipping was found to harm least."""
    exits = {max(1, number // part) for part in (8, 4, 3, 2)} | {number - max(1, number // part) for part in (3, 4)}
    pieces = [
        range(number // 4, number // 2),
        range(number // 2, 3 * number // 4),
        range(number // 2, number - 1),
        range(number // 4, 3 * number // 4),
        range(1, number - 1, 2),
        range(number // 4, number - 1, 2),
    ]
    every = [*(range(first, number) for first in sorted(exits)), *pieces]
    return [one for one in dict.fromkeys(every) if 0 < len(one) < number]
