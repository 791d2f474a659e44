"""Own tokens by two kernels on a GPU: one over blocks of the vocabulary, one over the results of these.

The first adds shared noise to logits after temperature, and keeps the best tokens of each block; scores stay in registers.
A score and its token are packed into one integer, ordered by score and then by lower token. Noise has the bits of
`cascade.engine.sampling.own_tokens.noise_bits`; logarithms are the device's own.

Needs Triton and a C compiler. ``TRITON_INTERPRET=1``, set before Triton is imported, runs the kernels on a CPU.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from cascade.engine.devices import sent
from cascade.splitmix import GOLDEN as _GOLDEN

BLOCK = 1024  # tokens of a program
ROUNDING = {"enable_fp_fusion": False}  # no fused multiply-add, as in PyTorch's operations
GOLDEN = tl.constexpr(_GOLDEN)
UNIT = tl.constexpr(2.0**-53)
LOWEST = tl.constexpr(2.0**-54)
HIGHEST = tl.constexpr(1 - 2.0**-24)
LEAST = tl.constexpr(-(2**63))  # less than any token
LOW = tl.constexpr(2**31 - 1)


def own_tokens(logits: Tensor, noises: Sequence[tuple[int, int, float]], number: int) -> Tensor:
    """Own tokens and ``number`` runner-ups, like `cascade.engine.sampling.own_tokens.own_tokens_and_next`.

    ``logits`` ``[N, V]`` are float32, bfloat16 or float16, already filtered if necessary; ``noises`` has for each row the
    position, the mixed seed, and the temperature, 0 for the likeliest token. Does not wait for the GPU.
    """
    rows, size = logits.shape
    out = torch.empty(1 + 2 * number, rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    positions, seeds, temperatures = zip(*noises, strict=True)
    bits = np.array(temperatures, dtype=np.float32).view(np.int32).tolist()
    given, highest = sent([positions, seeds, bits], logits.device), logits.amax(-1)
    blocks, kept = triton.cdiv(size, BLOCK), 1 + number
    best = torch.empty(rows, blocks * kept, dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):
        _of_blocks[(rows, blocks)](logits, logits.stride(0), highest, given, best, rows, size, kept, BLOCK, **ROUNDING)
        _of_rows[(rows,)](best, out, rows, blocks * kept, number, triton.next_power_of_2(blocks * kept), **ROUNDING)
    return out


@triton.jit
def _mix(z: tl.tensor) -> tl.tensor:
    """SplitMix64's finaliser on uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def noise_bits(position: tl.tensor, seed: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """53 random bits, uint64, for each of ``tokens`` int64; ``position`` and ``seed`` are int64."""
    key = _mix(position.to(tl.uint64, bitcast=True) + GOLDEN)
    key = _mix(key ^ seed.to(tl.uint64, bitcast=True))
    return _mix(key + (tokens + 1).to(tl.uint64, bitcast=True) * GOLDEN) >> 11


@triton.jit
def _gumbel(bits: tl.tensor) -> tl.tensor:
    uniform = bits.to(tl.int64, bitcast=True).to(tl.float32) * UNIT
    uniform = tl.minimum(tl.maximum(uniform, LOWEST), HIGHEST)
    rest = 1.0 - uniform
    # -log1p(-uniform): the rounding error of `rest` is in both factors (Kahan)
    exponential = tl.where(rest == 1.0, uniform, tl.div_rn(tl.log(rest), rest - 1.0) * uniform)
    return -tl.log(exponential)


@triton.jit
def _order(scores: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """int64 with the order of float32 scores, equal ones with the lower token first; NaN is above all."""
    bits = tl.where(scores == 0, 0, scores.to(tl.int32, bitcast=True))  # two zeros are equal
    bits = tl.where(scores != scores, 0x7FC00000, bits)
    ascending = bits ^ ((bits >> 31) & LOW)
    return (ascending.to(tl.int64) << 32) | (tokens ^ LOW)


@triton.jit
def _score(order: tl.tensor) -> tl.tensor:
    ascending = (order >> 32).to(tl.int32)
    return (ascending ^ ((ascending >> 31) & LOW)).to(tl.float32, bitcast=True)


@triton.jit
def _token(order: tl.tensor) -> tl.tensor:
    return (order & LOW) ^ LOW


@triton.jit(do_not_specialize=["rows", "kept"])
def _of_blocks(
    logits: tl.tensor,
    stride: tl.tensor,
    highest: tl.tensor,
    given: tl.tensor,
    best: tl.tensor,
    rows: tl.tensor,
    size: tl.tensor,
    kept: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the ``kept`` best tokens of a row's block, by `_order`."""
    row, block = tl.program_id(0), tl.program_id(1)
    tokens = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = tokens < size
    scores = tl.load(logits + row.to(tl.int64) * stride + tokens, mask=inside, other=0.0).to(tl.float32)
    temperature = tl.load(given + 2 * rows + row).to(tl.int32).to(tl.float32, bitcast=True)
    if temperature > 0:
        position, seed = tl.load(given + row), tl.load(given + rows + row)
        scores = tl.div_rn(scores - tl.load(highest + row).to(tl.float32), temperature)
        scores += _gumbel(noise_bits(position, seed, tokens))
    orders = tl.where(inside, _order(scores, tokens), LEAST)
    place = best + (row.to(tl.int64) * tl.num_programs(1) + block) * kept
    for rank in range(kept):
        first = tl.max(orders)
        tl.store(place + rank, first)
        orders = tl.where(orders == first, LEAST, orders)


@triton.jit(do_not_specialize=["rows", "number"])
def _of_rows(
    best: tl.tensor, out: tl.tensor, rows: tl.tensor, count: tl.tensor, number: tl.tensor, WIDTH: tl.constexpr
) -> None:
    """Write a row's own token, runner-ups and bits of their gaps, from the ``count`` best tokens of its blocks."""
    row = tl.program_id(0)
    places = tl.arange(0, WIDTH)
    orders = tl.load(best + row.to(tl.int64) * count + places, mask=places < count, other=LEAST)
    own = tl.max(orders)
    tl.store(out + row, _token(own))
    following = own
    for rank in range(number):
        orders = tl.where(orders == following, LEAST, orders)
        following = tl.max(orders)
        gap = _score(own) - _score(following)
        tl.store(out + (1 + rank) * rows + row, _token(following))
        tl.store(out + (1 + number + rank) * rows + row, gap.to(tl.int32, bitcast=True).to(tl.int64))
