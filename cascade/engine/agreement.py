"""Whether a network on our path says what it says by itself: what it is asked at load, and what counts as the same."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03}  # of logits at load, relative to their size
COARSE = 0.15  # the same for other dtypes, such as bfloat16


def probe_texts(vocab_size: int) -> list[list[int]]:
    """Two texts of 10 tokens, scored at load to see that the model takes the path."""
    return [[(7919 * place + 104729 * text + 1) % vocab_size for place in range(10)] for text in (1, 2)]


def agree(network: PreTrainedModel, found: Tensor, expected: Tensor) -> bool:
    """Whether logits ``[texts, n, vocab_size]`` are those expected of the last ``n`` positions."""
    return _close(found, expected[:, -found.shape[1] :], _tolerance(network))


def _tolerance(network: PreTrainedModel) -> float:
    in_4_bits = getattr(network, "is_loaded_in_4bit", False)  # whose products are in bfloat16 whatever the network's dtype
    return COARSE if in_4_bits else TOLERANCE.get(network.dtype, COARSE)


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether logits ``[texts, n, vocab_size]`` agree at most positions of each text.

    Not at all of them: where rounding makes a mixture choose another expert, two runs of the model itself differ.
    """
    found, expected = found.float(), expected.float()
    size = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-9)
    errors = (found - expected).norm(dim=-1) / size
    return bool((errors.median(dim=-1).values <= tolerance).all())  # false for what is not a number
