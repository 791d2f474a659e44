"""A head that goes on with hidden states by itself, token after token; knows nothing of its layers.

Position i of its text is the token at i + 1 together with what is kept of the hidden states at i, so that it guesses the token
at i + 2. After the text its own output takes the place of hidden states.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cascade.draft import Draft
from cascade.engine.heads.guesses import Guesses, Text
from cascade.engine.heads.head import Head, where
from cascade.engine.heads.reader import Reader
from cascade.engine.network.attention import Span


class Chain(Head):
    """EAGLE and what is like it: has keys and values of its own."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def logits(self, out: Tensor) -> Tensor:
        """``[n, tokens it knows]`` of what `_pass` gives."""
        raise NotImplementedError

    def next_state(self, out: Tensor) -> Tensor:
        """What is in the place of a state after the text."""
        return out

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, reader: Any, planned: Any) -> Tensor:
        """``[n, width]`` of its last layer for ``tokens`` ``[n]`` and ``states`` ``[n, width]`` at ``positions`` ``[1, n]``.

        Its layers attend by `Reader.attend`, which is given ``planned``.
        """
        raise NotImplementedError

    def _pass(self, tokens: Tensor, states: Tensor, reader: Reader, spans: Sequence[Span]) -> Tensor:
        return self.forward(tokens, states, where(spans, self.device), reader, reader.plan(spans))

    def draft(self, texts: Sequence[Text], reader: Reader) -> list[Draft]:
        last = self._read(texts, reader)
        active = [number for number in last if texts[number].guesses]
        guesses = Guesses(texts)
        if active:
            hidden = torch.stack([last[number] for number in active])
            with reader.guess_stores([texts[number] for number in active]) as stores:
                self._go_on(guesses, dict(zip(active, stores, strict=True)), hidden, reader)
        return guesses.drafts()

    def _go_on(self, guesses: Guesses, stores: Mapping[int, Any], hidden: Tensor, reader: Reader) -> None:
        """Guess after each text, by its number, and after its guesses."""
        active, texts = list(stores), guesses.texts
        while True:
            chosen = guesses.choose(active, self.whole(self.logits(hidden)))
            kept = [row for row, number in enumerate(active) if texts[number].guesses > guesses.step]
            if not kept:
                return
            active = [active[row] for row in kept]
            tokens, states = chosen[kept], self.next_state(hidden[kept])
            ends = [texts[number].end - 2 + guesses.step for number in active]
            spans = [Span(stores[number], row, row + 1, ends[row]) for row, number in enumerate(active)]
            hidden = self._pass(tokens, states, reader, spans)

    def _read(self, texts: Sequence[Text], reader: Reader) -> dict[int, Tensor]:
        """Go on with what a pass has read: what the last token makes of each text that grew, ``[width]``, by its number."""
        spans: list[Span] = []
        tokens: list[int] = []
        ends: dict[int, int] = {}
        for number, text in enumerate(texts):
            first = max(text.store.position, text.start - 1)  # whose next token is known only now; what is before is its base's
            new = list(text.tokens[first + 1 - text.start :])
            if new:
                spans.append(Span(text.store, len(tokens), len(tokens) + len(new), first))
                tokens += new
                ends[number] = len(tokens) - 1
        if not tokens:
            return {}
        ids = torch.tensor(tokens).to(self.device, non_blocking=True)
        out = self._pass(ids, reader.states(spans), reader, spans)
        return {number: out[end] for number, end in ends.items()}
