"""P-EAGLE: EAGLE-3 that makes all guesses after a text in one step.

The first guess is EAGLE-3's. Each place after it takes a mask for the token and what was learnt for the hidden states, and
sees the text and the masks before it:

    h = fc(mask_hidden),  embedding = that of the mask's token;   logits = head(norm(out))

As published: EAGLE-3's tensors and ``mask_hidden``.

"P-EAGLE: Parallel-Drafting EAGLE with Scalable Training", arXiv 2602.01469.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cascade.engine.heads.checkpoint import Checkpoint
from cascade.engine.heads.eagle import Eagle3
from cascade.engine.heads.guesses import Guesses
from cascade.engine.heads.head import Verifier
from cascade.engine.heads.reader import Reader
from cascade.engine.network.attention import Span
from cascade.scorer import MAX_FORKED

USUAL = 8  # guesses after a text, where a configuration does not say it


class Peagle(Eagle3):
    """Guesses after the first one know nothing of those before them."""

    kind = "peagle"

    def __init__(self, *given: Any, mask: int, most: int, **options: Any) -> None:
        """``mask`` is a token id; ``most`` are the guesses that it was trained for."""
        super().__init__(*given, **options)
        self.mask_hidden = nn.Parameter(torch.empty(self.fc.in_features))
        self.most = most
        self._mask = mask

    @classmethod
    def fits(cls, checkpoint: Checkpoint) -> bool:
        return checkpoint.query_width == 2 and "mask_hidden" in checkpoint.weights

    @classmethod
    def of(cls, checkpoint: Checkpoint, verifier: Verifier, **options: Any) -> Eagle3:
        config, names = checkpoint.config, ("mask_token_id", "ptd_token_id", "pard_token")
        mask = next((config[name] for name in names if config.get(name) is not None), None)
        methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        most = min(MAX_FORKED, int(methods[0].get("speculative_tokens") or USUAL))
        return super().of(checkpoint, verifier, mask=checkpoint.check_mask(mask, verifier), most=most, **options)

    def _go_on(self, guesses: Guesses, stores: Mapping[int, Any], hidden: Tensor, reader: Reader) -> None:
        active, texts = list(stores), guesses.texts
        masks = [texts[number].guesses - 1 for number in active]
        begins = [len(active)]  # of their places, after the first guesses
        for count in masks:
            begins.append(begins[-1] + count)
        if any(masks):
            hidden = torch.cat([hidden, self._masked(guesses, stores, masks, reader)])
        logits = self.whole(self.logits(hidden))
        for step in range(1 + max(masks)):
            kept = [row for row, count in enumerate(masks) if count >= step]
            guesses.choose([active[row] for row in kept], logits[[begins[row] + step - 1 if step else row for row in kept]])

    def _masked(self, guesses: Guesses, stores: Mapping[int, Any], masks: list[int], reader: Reader) -> Tensor:
        """``[n, width]`` of the masks after all texts, ``masks`` of each."""
        spans: list[Span] = []
        total = 0
        for (number, store), count in zip(stores.items(), masks, strict=True):
            if count:
                spans.append(Span(store, total, total + count, guesses.texts[number].end - 1))
                total += count
        tokens = torch.full((total,), self._mask, device=self.device)
        state = self.state(self.mask_hidden[None].chunk(len(self.reads), dim=-1))
        return self._pass(tokens, state.expand(total, -1), reader, spans)
