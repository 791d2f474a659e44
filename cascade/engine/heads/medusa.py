"""Medusa: heads beside a model's own that each guess a token further ahead, from the same hidden state.

    guess_k = argmax W_k r_k(h),   r_k a chain of x + SiLU(A x + b),   for the k-th token after the own one

h is the last hidden state of the last token that was read (Cai et al., arXiv 2401.10774).

As published: ``{h}.{l}.linear.*`` and ``{h}.{num_layers}.weight`` in ``medusa_lm_head.pt`` or ``.safetensors``, or, as vLLM has
it, ``blocks.{h}.layers.{l}.*``, ``lm_heads.{h}.weight`` and ``token_map``.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from cascade.draft import Draft
from cascade.engine.heads.checkpoint import Checkpoint
from cascade.engine.heads.guesses import Guesses, Text
from cascade.engine.heads.head import Head, Verifier
from cascade.engine.heads.reader import Reader
from cascade.engine.network.attention import Span


class Block(nn.Module):
    """One chain and its projection to the vocabulary."""

    def __init__(self, layers: Sequence[nn.Linear], lm_head: nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.lm_head = lm_head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return self.lm_head(x)


class Medusa(Head):
    """Reads the last hidden state alone: it has no keys and values."""

    kind = "medusa"
    names = (
        (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
        (r"^(\d+)\.\d+\.weight$", r"blocks.\1.lm_head.weight"),
        (r"^lm_heads\.(\d+)\.", r"blocks.\1.lm_head."),
    )

    def __init__(self, blocks: Sequence[Block], verifier: Verifier, ids: Tensor | None = None) -> None:
        """``ids`` are those tokens of the heads, if not all."""
        super().__init__(verifier.vocab_size, ids)
        self.blocks = nn.ModuleList(blocks)
        self.reads = (verifier.num_layers,)
        self.width = verifier.hidden_size
        self.most = len(blocks)

    @classmethod
    def fits(cls, checkpoint: Checkpoint) -> bool:
        return checkpoint.count("blocks.{}.") > 0

    @classmethod
    def of(cls, checkpoint: Checkpoint, verifier: Verifier) -> "Medusa":
        size, blocks = verifier.hidden_size, []
        for number in range(checkpoint.count("blocks.{}.")):
            block = f"blocks.{number}."
            tokens, inputs = (checkpoint.size(f"{block}lm_head.weight", axis) for axis in (0, 1))
            checkpoint.check_hidden(inputs, verifier)
            biased = f"{block}layers.0.bias" in checkpoint.weights
            layers = [nn.Linear(size, size, bias=biased) for _ in range(checkpoint.count(block + "layers.{}."))]
            blocks.append(Block(layers, nn.Linear(size, tokens, bias=False)))
        ids = checkpoint.token_ids("token_map", blocks[0].lm_head.out_features, verifier, offsets=False)
        return cls(blocks, verifier, ids)

    def state(self, hidden: Sequence[Tensor]) -> Tensor:
        return hidden[0]

    def draft(self, texts: Sequence[Text], reader: Reader) -> list[Draft]:
        guesses = Guesses(texts)
        active = [number for number, text in enumerate(texts) if text.guesses]
        if not active:
            return guesses.drafts()
        hidden = reader.states(
            [Span(texts[number].store, row, row + 1, texts[number].end - 2) for row, number in enumerate(active)]
        )
        for step, block in enumerate(self.blocks):
            rows = [row for row, number in enumerate(active) if texts[number].guesses > step]
            if not rows:
                break
            logits = self.whole(block(hidden[rows] if len(rows) < len(active) else hidden))
            guesses.choose([active[row] for row in rows], logits)
        return guesses.drafts()
