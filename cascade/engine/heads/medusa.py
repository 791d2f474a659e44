"""Medusa: heads beside a model's own that each guess a token further ahead, from the same hidden state.

    guess_k = argmax W_k r_k(h),   r_k a chain of x + SiLU(A x + b),   for the k-th token behind the own one

h is the last hidden state of the last token that was read (Cai et al., arXiv 2401.10774).
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from cascade.draft import Draft
from cascade.engine.heads.guesses import Guesses, Text
from cascade.engine.heads.head import Head, Part, Place


class Block(nn.Module):
    """One chain and its projection to the vocabulary."""

    def __init__(self, layers: Sequence[nn.Linear], lm_head: nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.lm_head = lm_head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        out: Tensor = self.lm_head(x)
        return out


class Medusa(Head):
    """Reads the last hidden state alone: it has no keys and values."""

    kind = "medusa"

    def __init__(
        self, blocks: Sequence[Block], *, num_layers: int, hidden_size: int, vocab_size: int, ids: Tensor | None
    ) -> None:
        """``num_layers`` and sizes are the verifier's; ``ids`` those tokens of the heads, if not all."""
        super().__init__(vocab_size, ids)
        self.blocks = nn.ModuleList(blocks)
        self.reads = (num_layers,)
        self.width = hidden_size
        self.most = len(blocks)

    def state(self, hidden: Sequence[Tensor]) -> Tensor:
        return hidden[0]

    def draft(self, texts: Sequence[Text], place: Place) -> list[Draft]:
        guesses = Guesses(texts)
        active = [number for number, text in enumerate(texts) if text.guesses]
        if not active:
            return guesses.drafts()
        ends = [(texts[number].store, texts[number].end) for number in active]
        hidden = place.states([Part(store, end - 2, end - 1) for store, end in ends])
        for step, block in enumerate(self.blocks):
            rows = [row for row, number in enumerate(active) if texts[number].guesses > step]
            if not rows:
                break
            logits = self.whole(block(hidden[rows] if len(rows) < len(active) else hidden))
            guesses.choose([active[row] for row in rows], logits)
        return guesses.drafts()

    def first(self, text: Text, place: Place) -> Tensor:
        return self.whole(self.blocks[0](place.states([Part(text.store, 0, text.end - 1)]))).argmax(-1)
