"""DSpark: DFlash whose guesses follow upon each other, and that says how sure it is of each.

    logits_k = DFlash's logits_k + W2 f(W1[x_{k-1}], h_k),   f one of three kinds;   P(right) = sigmoid(w [h_k, W1[x_{k-1}]])

x_{k-1} is the guess before the k-th, or the last token of the text; h_k what the layers make of its place.

    plain: e;   gated: sigmoid(g [h, e]) e;   recurrent: a state s goes along the block, [g, c, o] = j [s, e, h],
    s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), and f is tanh(o)

As published (DeepSpec, SpecForge): DFlash's tensors and keys, some or all of these at the top level, ``markov_head`` and
``confidence_head``. Each place of a block guesses the token after it.

Cheng et al., "DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation", arXiv 2607.05147.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cascade.draft import Draft
from cascade.engine.heads.checkpoint import Checkpoint
from cascade.engine.heads.dflash import DFlash
from cascade.engine.heads.guesses import Guesses, Text
from cascade.engine.heads.head import Verifier

KINDS = {"plain": "", "gated": "gate_proj", "recurrent": "joint_proj"}  # and the layer that only they have


class Markov(nn.Module):
    """What the guess before adds to logits."""

    def __init__(self, kind: str, *, rank: int, vocab_size: int, tokens: int, hidden_size: int) -> None:
        """``tokens`` are those that it can guess."""
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, tokens, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if kind == "recurrent":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, tokens]``, and the next state, of ``before`` and ``state`` ``[n, rank]`` and ``[n, hidden_size]``."""
        if self.kind == "gated":
            before = torch.sigmoid(self.gate_proj(torch.cat([hidden, before], -1))) * before
        elif self.kind == "recurrent":
            gate, new, out = self.joint_proj(torch.cat([state, before, hidden], -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state, before = gate * state + (1 - gate) * torch.tanh(new), torch.tanh(out)
        return self.markov_w2(before), state


class Confidence(nn.Module):
    """Log-odds that a guess is right."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """``[n]`` of ``[n, hidden_size]`` and ``[n, rank]``, which not every head looks at."""
        inputs = torch.cat([hidden, before], -1)[:, : self.proj.in_features]
        return self.proj(inputs)[:, 0]


class DSpark(DFlash):
    """Has a Markov head, or says how sure it is, or both."""

    kind = "dspark"
    follows = shifted = True

    def __init__(self, *given: Any, markov: Markov | None, confidence: Confidence | None, **options: Any) -> None:
        super().__init__(*given, **options)
        if markov is not None:
            self.markov_head = markov
        if confidence is not None:
            self.confidence_head = confidence
        self._heads = (markov, confidence)

    @classmethod
    def of(cls, checkpoint: Checkpoint, verifier: Verifier, **options: Any) -> DFlash:
        size, weights, vocab_size = checkpoint.size("fc.weight"), checkpoint.weights, verifier.vocab_size
        markov, confidence, rank = None, None, 0
        if "markov_head.markov_w1.weight" in weights:
            own_head = "lm_head.weight" in checkpoint.own_names(verifier)
            tokens = checkpoint.size("lm_head.weight") if own_head else vocab_size
            rank = checkpoint.size("markov_head.markov_w1.weight", 1)
            kind = next((kind for kind, layer in KINDS.items() if layer and f"markov_head.{layer}.weight" in weights), "plain")
            markov = Markov(kind, rank=rank, vocab_size=vocab_size, tokens=tokens, hidden_size=size)
        if "confidence_head.proj.weight" in weights:
            confidence = Confidence(size + rank if checkpoint.size("confidence_head.proj.weight", 1) > size else size)
        return super().of(checkpoint, verifier, markov=markov, confidence=confidence, **options)

    def guesses_of(self, hidden: Tensor, texts: Sequence[Text]) -> list[Draft]:
        (markov, confidence), guesses = self._heads, Guesses(texts)
        active, sure = list(range(len(texts))), []
        last = torch.tensor([text.tokens[-1] for text in texts]).to(hidden.device, non_blocking=True)
        state = hidden.new_zeros(len(texts), 0 if markov is None else markov.markov_w1.embedding_dim)
        for step in range(max(text.guesses for text in texts)):
            kept = [row for row, number in enumerate(active) if texts[number].guesses > step]
            if len(kept) < len(active):
                active, last, state = [active[row] for row in kept], last[kept], state[kept]
            x = hidden[:, step] if len(active) == len(texts) else hidden[active, step]
            logits, before = self.logits(x), state
            if markov is not None:
                before = markov.markov_w1(last)
                bias, state = markov(before, x, state)
                logits = logits + bias
            last = guesses.choose(active, self.whole(logits))
            if confidence is not None:
                sure.append(F.softplus(confidence(x, before).float()))
        return guesses.drafts(sure)
