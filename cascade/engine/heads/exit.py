"""Early exit: a model that was trained for it drafts for itself with its first layers (LayerSkip, arXiv 2404.16710).

    h = embedding;  h = layer_i(h) for the first E layers;  logits = head(norm(h))

Keys and values of the text are the model's, which is where they are; those of guesses lie in the same layers after the text,
and the next pass writes over them. So nothing is kept, and no hidden state is read.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from cascade.draft import Draft
from cascade.engine.heads.guesses import Guesses, Text
from cascade.engine.heads.head import Head
from cascade.engine.heads.reader import Reader
from cascade.engine.network.attention import Span
from cascade.engine.network.llama import is_written_out
from cascade.errors import ModelError
from cascade.scorer import MAX_FORKED


class Exit(Head):
    """Runs the first ``layers`` of ``network``; raises `ModelError` if it has no more, or our own code does not run it."""

    kind = "exit"
    reads = ()
    width = 0
    most = MAX_FORKED - 1  # the text's last token is read, too

    def __init__(self, network: PreTrainedModel, layers: int) -> None:
        embedding, head = network.get_input_embeddings().weight, network.get_output_embeddings().weight
        super().__init__(int(embedding.shape[0]))
        if not is_written_out(network):
            name = f"{type(network).__name__} on {network.device.type}"
            raise ModelError(
                f"The drafter 'exit' is for models of the Llama family on CPUs, not for {name}: choose another one"
            )
        every = network.base_model.layers
        if layers >= len(every):
            raise ModelError(f"drafter.layers is {layers}, but the model has {len(every)} layers: name fewer")
        self._first = layers
        skipped = sum(weight.numel() for layer in every[layers:] for weight in layer.parameters())
        unread = 0 if embedding is head else embedding.numel()  # by a pass of one token
        self.cost = 1 - skipped / (sum(weight.numel() for weight in network.parameters()) - unread)

    def draft(self, texts: Sequence[Text], reader: Reader) -> list[Draft]:
        guesses, asking = Guesses(texts), [number for number, text in enumerate(texts) if text.guesses]
        wanted = [texts[number]._replace(guesses=texts[number].guesses + 1) for number in asking]
        with reader.guess_stores(wanted) as made:
            stores = dict(zip(asking, made, strict=True))
            tokens = torch.tensor([texts[number].tokens[-1] for number in asking])
            while asking:
                last = [texts[number].end - 1 + guesses.step for number in asking]
                spans = [Span(stores[number], row, row + 1, last[row]) for row, number in enumerate(asking)]
                assert reader.written_out is not None
                every, planned = torch.arange(len(tokens)), reader.plan(spans)
                logits, _ = reader.written_out(tokens, torch.tensor(last), every, planned, first=self._first)
                chosen = guesses.choose(asking, logits)
                kept = [row for row, number in enumerate(asking) if texts[number].guesses > guesses.step]
                asking, tokens = [asking[row] for row in kept], chosen[kept]
        return guesses.drafts()
