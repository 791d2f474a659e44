"""From logits to own tokens, with noise that every tier shares.

    own(prefix, position) = argmax over x of  logits'(x) + G(seed, position, x)

``logits'`` are the logits after temperature, top-k, top-p and min-p; ``G`` is Gumbel noise, so the own token is an exact
sample of softmax(logits') (Gumbel 1954). Tiers that share the noise pick the same token more often than independent ones
could: Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cascade.params import SamplingParams

GOLDEN = 0x9E3779B97F4A7C15


def own_tokens(logits: Tensor, rows: Sequence[tuple[SamplingParams, int, int]]) -> Tensor:
    """Own tokens ``[N]`` int64 for ``logits`` ``[N, V]``, on their device, without a host read.

    Each of ``rows`` is ``(params, position, n)``: the next ``n`` rows of logits are for ``position, position + 1, ...`` of a
    request with these parameters, which must have a seed.
    """
    own = logits.argmax(-1)
    begin = 0
    for params, position, n in rows:
        if params.temperature > 0:
            part = slice(begin, begin + n)
            positions = torch.arange(position, position + n, device=logits.device)
            assert params.seed is not None
            noise = gumbel(params.seed, positions, logits.shape[-1])
            own[part] = (adjust(logits[part], params) + noise).argmax(-1)
        begin += n
    return own


def adjust(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits ``[n, V]`` after temperature, top-k, top-p and min-p, in that order; float32, removed tokens are -inf.

    The likeliest token always stays. Requires a temperature above 0.
    """
    scores = logits.float()
    scores = (scores - scores.amax(-1, keepdim=True)) / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        least = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if params.top_p < 1:
        scores = _nucleus(scores, params.top_p)
    if params.min_p > 0:
        # scores are relative to the likeliest token's, so p(x) < min_p * p(max) reads
        scores = scores.masked_fill(scores < torch.tensor(params.min_p).log().item(), -torch.inf)
    return scores


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose probability reaches ``top_p`` (Holtzman et al., arXiv 1904.09751)."""
    ordered, order = scores.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    beyond = before >= top_p  # never the likeliest, before which there is nothing
    return scores.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)


def gumbel(seed: int, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise ``[n, vocab_size]`` float32 for int64 ``positions`` ``[n]``."""
    uniform = noise_bits(seed, positions, vocab_size).to(torch.float32) * 2.0**-53
    # -log(uniform) has its precision where uniform is near 1; the tokens that win have it near 0
    exponential = -torch.log1p(-uniform.clamp(2.0**-54, 1 - 2.0**-24))
    return -exponential.log()


def noise_bits(seed: int, positions: Tensor, vocab_size: int) -> Tensor:
    """Uniform integers ``[n, vocab_size]`` from 0 to 2^53 - 1, int64, the same on every device.

    A counter-based generator: SplitMix64 (Steele, Lea, Flood 2014) started at a hash of seed and position and read at the
    token id.
    """
    key = _mix(_mix(positions + _signed(GOLDEN)) ^ _mix_int(seed))
    ids = torch.arange(1, vocab_size + 1, device=positions.device)
    return _shift(_mix(key[:, None] + ids * _signed(GOLDEN)), 11)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors, whose products wrap around on every device."""
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _mix_int(z: int) -> int:
    """The same for one Python integer."""
    return int(_mix(torch.tensor(_signed(z & (2**64 - 1)))))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(z: int) -> int:
    return z - 2**64 if z >= 2**63 else z
