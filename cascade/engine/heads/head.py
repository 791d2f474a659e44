"""What a drafter that reads a model's hidden states is; knows nothing of files, and of sessions only their texts."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cascade.draft import Draft
from cascade.engine.heads.guesses import Text
from cascade.engine.network.attention import Span
from cascade.engine.network.products import multiply_row_by_row
from cascade.scorer import MAX_FORKED

if TYPE_CHECKING:
    from cascade.engine.heads.checkpoint import Checkpoint
    from cascade.engine.heads.reader import Reader


class Verifier(NamedTuple):
    """The model that a head must fit; a tuple, so that a head's parts do not include the model's."""

    embed: nn.Module
    lm_head: nn.Module
    hidden_size: int
    vocab_size: int
    num_layers: int
    context_len: int

    @classmethod
    def of(cls, network: PreTrainedModel) -> "Verifier":
        text, embed = network.config.get_text_config(), network.get_input_embeddings()
        limit = getattr(text, "max_position_embeddings", None) or 2048
        sizes = (text.hidden_size, embed.weight.shape[0], text.num_hidden_layers, limit)
        return cls(embed, network.get_output_embeddings(), *map(int, sizes))


def where(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Positions of rows, one after another, ``[1, n]``."""
    return torch.tensor([position for span in spans for position in span.positions]).to(device, non_blocking=True)[None]


class Head(nn.Module):
    """A drafter that reads a model."""

    kind: ClassVar[str] = ""
    names: ClassVar[Sequence[tuple[str, str]]] = ()  # of tensors as published, see `cascade.engine.heads.checkpoint.Names`
    reads: tuple[int, ...]  # hidden states, as Transformers counts them: 0 are embeddings, the last is normed
    width: int  # numbers that it keeps of a position, see `state`
    attends: tuple[tuple[int, int, int, int], ...] = ()  # of each layer of its own, as `Survey.heads` has them
    windows: tuple[int | None, ...] = ()  # of these layers, see `Survey.windows`; none slides if this is empty
    most = MAX_FORKED  # tokens that it can guess
    cost = 0.0  # of a guess, as a share of a pass of one token; 0 where that is not known
    _ids: Tensor | None

    def __init__(self, vocab_size: int, ids: Tensor | None = None) -> None:
        """``ids`` are the tokens that it knows, if these are not all ``vocab_size``."""
        super().__init__()
        self.vocab_size = vocab_size
        self.register_buffer("_ids", ids, persistent=False)

    def embed_with(self, verifier: Verifier, names: Collection[str], size: int) -> None:
        """Have those embeddings ``[..., size]`` of its own that are in ``names``; the verifier's are in the place of others."""
        self._verifier = verifier
        if "embed_tokens.weight" in names:
            self.embed_tokens = nn.Embedding(verifier.vocab_size, size)
        if "lm_head.weight" in names:
            self.lm_head = nn.Linear(size, len(self.known), bias=False)

    @property
    def embed(self) -> Any:
        return self._modules.get("embed_tokens") or self._verifier.embed

    @property
    def project(self) -> Any:
        """From hidden states to logits of the tokens that it knows."""
        return self._modules.get("lm_head") or self._verifier.lm_head

    @classmethod
    def fits(cls, checkpoint: "Checkpoint") -> bool:
        """Whether tensors, by their ``names``, are those of such a head."""
        return False

    @classmethod
    def of(cls, checkpoint: "Checkpoint", verifier: Verifier) -> "Head":
        """The head of a checkpoint that `fits`, without weights; raises `ModelError` if it is not for this verifier."""
        raise NotImplementedError

    @property
    def known(self) -> list[int]:
        return list(range(self.vocab_size)) if self._ids is None else list(self._ids.tolist())

    @property
    def own_layers(self) -> list[Any]:
        """With keys and values of their own."""
        return list(getattr(self, "layers", ()))

    def number(self, first: int) -> None:
        """Let its own layers be those from ``first`` on."""
        for place, layer in enumerate(self.own_layers, first):
            layer.self_attn.layer_idx = place

    def state(self, hidden: Sequence[Tensor]) -> Tensor:
        """What is kept of each token ``[n, width]``, of the hidden states ``[n, hidden_size]`` that it ``reads``."""
        raise NotImplementedError

    def keep(self, hidden: Sequence[Tensor], spans: Sequence[Span], planned: Any, reader: "Reader") -> None:
        """Keep what a pass has read: ``hidden`` as for `state`, maybe with tokens of no row at their end."""
        if self.width:
            reader.keep(spans, self.state(hidden))

    def draft(self, texts: Sequence[Text], reader: "Reader") -> list[Draft]:
        """Guesses after each text, as many as are wanted or fewer."""
        raise NotImplementedError

    def whole(self, logits: Tensor) -> Tensor:
        """Logits ``[n, vocab_size]``; tokens that it does not know are impossible."""
        if self._ids is None:
            return logits
        out = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        out[:, self._ids] = logits
        return out

    def match_model(self, dtype: torch.dtype) -> None:
        """Multiply as the model does, whose hidden states are of ``dtype``."""
        if dtype is torch.float32:
            self.float()
        multiply_row_by_row(self)
