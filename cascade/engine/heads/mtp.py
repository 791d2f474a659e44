"""Multi-token prediction: one more layer of a model's own kind, trained with it, that guesses a token further ahead.

Position i of its text is the token at i + 1 together with the model's last hidden state at i, behind its final norm:

    x = proj(norm(embedding), norm(h)), in some models the other way round;  out = norm(layer(x));  logits = head(out)

Behind the text its own output, normed, takes the place of hidden states (DeepSeek-V3, arXiv 2412.19437, section 2.2, where
each guess has a layer; models are published with one, which guesses them all).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cascade.engine.heads.chain import Chain
from cascade.engine.heads.eagle import Shared
from cascade.engine.heads.head import Place
from cascade.engine.kv import Span
from cascade.engine.survey import Survey


class Mtp(Chain):
    """A decoder layer of Transformers, behind embeddings and hidden states."""

    kind = "mtp"

    def __init__(
        self,
        block: nn.Module,
        norm: Callable[[], nn.Module],
        shared: Shared,
        rotary: nn.Module,
        *,
        num_layers: int,
        hidden_size: int,
        vocab_size: int,
        hidden_first: bool = False,
        own_embed: bool = False,
        own_head: bool = False,
    ) -> None:
        """``num_layers`` and sizes are the verifier's; ``rotary`` gives the block its angles.

        With ``own_embed`` or ``own_head`` it has an embedding or an output embedding that is not the verifier's, and with
        ``hidden_first`` its projection takes the hidden state before the embedding.
        """
        super().__init__(vocab_size)
        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = block
        self.reads, self.width = (num_layers,), hidden_size
        if own_embed:
            self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        if own_head:
            self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self._hidden_first = hidden_first
        self._verifiers = (shared, rotary)  # a tuple: its modules stay the verifier's

    def number(self, first: int) -> None:
        for module in self.block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = first  # type: ignore[assignment]

    def survey(self, found: Survey) -> None:
        """Note what its layer attends with; the network's attention is that of surveys meanwhile."""
        like = self.eh_proj.weight
        tokens = torch.zeros(2, dtype=torch.long, device=like.device)
        self(tokens, like.new_zeros(2, self.width), torch.arange(2, device=like.device)[None], cascade_pass=found)
        self.attends = tuple(found.heads.values())

    def state(self, hidden: Sequence[Tensor]) -> Tensor:
        return hidden[0]

    def logits(self, out: Tensor) -> Tensor:
        head = self.lm_head if hasattr(self, "lm_head") else self._verifiers[0].lm_head
        found: Tensor = head(out)
        return found

    def _pass(self, tokens: Tensor, states: Tensor, positions: Sequence[int], place: Place, spans: Sequence[Span]) -> Tensor:
        where = torch.tensor(positions).to(tokens.device, non_blocking=True)[None]
        return self.forward(tokens, states, where, cascade_pass=place.plan(spans))

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """``[n, width]`` of ``tokens`` ``[n]`` and ``states`` ``[n, width]`` at ``positions`` ``[1, n]``; ``attention`` is told
        to the attention function."""
        shared, rotary = self._verifiers
        embed = self.embed_tokens if hasattr(self, "embed_tokens") else shared.embed
        parts = (self.enorm(embed(tokens)), self.hnorm(states))
        x = self.eh_proj(torch.cat(parts[::-1] if self._hidden_first else parts, dim=-1))[None]
        angles = rotary(x, positions)
        out = self.block(x, attention_mask=None, position_ids=positions, position_embeddings=angles, **attention)
        whole: Tensor = self.norm((out[0] if isinstance(out, tuple) else out)[0])
        return whole
