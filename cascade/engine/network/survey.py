"""Finds out what the layers of a network attend to, by a forward pass with a recording attention function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from cascade.cpu.attention import Sizes
from cascade.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # takes seconds

SURVEY = "cascade_survey"  # the name of this function in Transformers
SIZES = "cascade_sizes"  # the same for passes without a mask
# the error allowed when a model is loaded, relative to the size of logits
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03}
COARSE = 0.15  # the same for other dtypes, such as bfloat16
FAR = 4096  # the position at which a mask is examined if it names no size of its own


@dataclass(slots=True)
class Survey:
    """Results of a forward pass with the attention `SURVEY`; a layer's window is derived from its mask."""

    windows: dict[int, int | None] = field(default_factory=dict)
    strange: bool = False  # some layer's mask is neither causal nor a sliding window
    heads: dict[int, Sizes] = field(default_factory=dict)

    @classmethod
    def of(cls, network: "PreTrainedModel") -> Self:
        """Survey a loaded network, which keeps this attention; raises `ModelError` if it cannot be served with ours."""
        register()
        network.set_attn_implementation(SURVEY)
        ids = torch.zeros(1, 2, dtype=torch.long, device=network.device)
        survey = cls()
        network(input_ids=ids, use_cache=False, cascade_pass=survey)
        layers = network.config.get_text_config().num_hidden_layers
        if len(survey.windows) != layers:
            raise ModelError(f"{len(survey.windows)} of its {layers} layers use the attention interface of Transformers")
        if survey.strange:
            raise ModelError("it has layers that are neither full nor sliding attention")
        return survey

    def cut(self, layers: Sequence[int]) -> "Survey":
        """The survey of a network that has only these ``layers``."""
        places = dict(enumerate(layers))
        heads = {place: self.heads[layer] for place, layer in places.items()}
        return Survey({place: self.windows[layer] for place, layer in places.items()}, self.strange, heads)


def survey(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cascade_pass: Survey | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Record the window and the heads of a layer; the result of attention does not matter."""
    if cascade_pass is None:
        raise TypeError(f"{type(module).__name__} does not hand the pass on to its attention function")
    window = -1 if attention_mask is None else int(attention_mask.flatten()[0])
    cascade_pass.strange |= window < 0
    cascade_pass.windows[module.layer_idx] = window or None  # type: ignore[index]
    sizes = Sizes(query.shape[1], key.shape[1], key.shape[3], value.shape[3])
    cascade_pass.heads[module.layer_idx] = sizes  # type: ignore[index]
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def window_of_mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Tensor:
    """A mask's sliding window, 0 if it is only causal, -1 for any other mask; ``[1, 1, 1, 1]``.

    Registered for `SURVEY`, so that models pass it to their layers instead of a mask.
    """
    far = 2 * local_size if local_size else FAR
    counts = set()
    for position in (far, far + far // 4):  # unlike windows, chunks show different numbers of positions to the two
        query, keys, first = torch.tensor(position), torch.arange(position + 2), torch.tensor(0)
        seen = mask_function(first, first, query, keys).expand_as(keys)
        count = int(seen.sum())
        regular = seen[position + 1 - count : position + 1].all() and not seen[position + 1]
        counts.add(-1 if not regular else 0 if count == position + 1 else count)
    return torch.tensor(counts.pop() if len(counts) == 1 else -1).reshape(1, 1, 1, 1)


def probe_texts(vocab_size: int) -> list[list[int]]:
    """Two texts of 10 tokens, scored at load to check packed passes against the network's own."""
    return [[(7919 * place + 104729 * text + 1) % vocab_size for place in range(10)] for text in (1, 2)]


def agree(network: Any, logits: Tensor, expected: Tensor) -> bool:
    """Whether logits ``[texts, n, vocab_size]`` are those expected of the last ``n`` positions, at most positions of each text.

    Not all positions must agree: where rounding makes a mixture choose another expert, two runs of the model itself differ.
    """
    in_4_bits = getattr(network, "is_loaded_in_4bit", False)  # its products are in bfloat16, whatever the network's dtype
    tolerance = COARSE if in_4_bits else TOLERANCE.get(network.dtype, COARSE)
    logits, expected = logits.float(), expected[:, -logits.shape[1] :].float()
    size = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-9)
    errors = (logits - expected).norm(dim=-1) / size
    return bool((errors.median(dim=-1).values <= tolerance).all())  # false for NaN


@cache
def register() -> None:
    """Register these functions in Transformers, whose model code takes seconds to import."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(SURVEY, survey)
    AttentionInterface.register(SIZES, survey)
    AttentionMaskInterface.register(SURVEY, window_of_mask)
