"""Laws of the kernels that choose own tokens on a GPU, in Triton's interpreter; `test_kernel.py` runs them in a process of
their own, since Triton reads ``TRITON_INTERPRET`` when it is imported."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from cascade.engine.sampling import kernel
from cascade.engine.sampling.own_tokens import Choice, by_kernel, by_operations, mixed, noise_bits, runner_ups, sampled
from cascade.params import SamplingParams
from tests.engine.sampling.test_sampling import SHAPES as SAMPLED

SEED = 2**63 - 25  # signed and negative once it is mixed
# logarithms of NumPy and of PyTorch differ in their last places; a gap is the difference of two numbers below 64
GAP = 64 * 2.0**-23 * 2


@pytest.fixture(autouse=True)
def wraps() -> Any:
    """Products of integers wrap around, of which NumPy warns."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        yield


def chosen(logits: torch.Tensor, rows: list[Choice], number: int) -> torch.Tensor:
    return by_kernel(kernel.own_tokens, logits, list(sampled(rows)), number)


def alike(logits: torch.Tensor, rows: list[Choice], number: int) -> None:
    """Own tokens and runner-ups of the kernels are those of PyTorch's operations; gaps up to what logarithms differ by."""
    found = chosen(logits, rows, number).tolist()
    expected = by_operations(logits, list(sampled(rows)), number).tolist()
    assert found[0] == expected[0]
    if not number:
        return
    pairs = zip(runner_ups(found, number), runner_ups(expected, number), strict=True)
    for (one, other), (params, *_) in zip(pairs, [row for row in rows for _ in range(row[2])], strict=True):
        assert [up.token for up in one] == [up.token for up in other]
        if not params.temperature:
            assert one == other
        assert [up.gap for up in one] == pytest.approx([up.gap for up in other], abs=GAP)


def rows_of(number: int, *temperatures: float, **filters: Any) -> list[Choice]:
    """``number`` rows of logits in turn at these temperatures, two of each."""
    return [
        (SamplingParams(temperature=temperatures[place % len(temperatures)], seed=SEED - place, **filters), 100 + place, 1)
        for place in range(number)
    ]


@triton.jit
def _write_bits(given: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    tokens = tl.arange(0, SIZE).to(tl.int64)
    bits = kernel.noise_bits(tl.load(given), tl.load(given + 1), tokens)
    tl.store(out + tokens, bits.to(tl.int64, bitcast=True))


@pytest.mark.parametrize("seed", [0, 1, SEED, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 77, 2**31 + 5])
def test_noise_has_the_bits_of_every_device(seed: int, position: int) -> None:
    """Guards tiers on different devices that share no noise, and so never agree: all 53 bits of each token."""
    out = torch.empty(512, dtype=torch.int64)
    _write_bits[(1,)](torch.tensor([position, mixed(seed)]), out, 512)
    assert torch.equal(out, noise_bits(mixed(seed), torch.tensor([position]), 512)[0])


@pytest.mark.parametrize("size", [1, 2, 1000, 1024, 1025, 3001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_own_tokens_are_those_of_pytorch(size: int, dtype: torch.dtype) -> None:
    """Guards vocabularies that are no multiple of a block, and passes after which nothing is chosen."""
    logits = (torch.randn(6, size, generator=torch.Generator().manual_seed(size)) * 4).to(dtype)
    for number in (0, 2):
        alike(logits, rows_of(6, 0.0, 0.3, 1.0), number)
    assert chosen(logits[:0], [(SamplingParams(seed=1), 5, 0)], 2).shape == (5, 0)


@pytest.mark.parametrize(
    ("number", "filters"),
    [(1, {}), (3, {"top_k": 3}), (8, {"top_p": 0.8}), (8, {"min_p": 0.1}), (64, {"top_k": 50, "top_p": 0.9, "min_p": 0.01})],
)
def test_rows_do_not_disturb_each_other(number: int, filters: dict[str, Any]) -> None:
    """Guards the places of rows: each has its own position, seed, temperature and filters, and logits stay as they are."""
    logits = torch.randn(number, 1100, generator=torch.Generator().manual_seed(number)) * 3
    before, rows = logits.clone(), [*rows_of(number // 2, 0.3, 1.0, 0.0, **filters), *rows_of(number - number // 2, 1.0, 0.0)]
    alike(logits, rows, 2)
    assert torch.equal(logits, before)
    whole = chosen(logits, rows, 2)
    for place in range(0, number, 21):
        assert torch.equal(chosen(logits[place : place + 1], rows[place : place + 1], 2)[:, 0], whole[:, place])


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = SAMPLED | {
    "two zeros": lambda logits: torch.where(logits > 0, -0.0, 0.0),
    "not a number": lambda logits: logits.index_fill(-1, torch.tensor([7, 1300]), torch.nan),
    "infinite": lambda logits: logits.index_fill(-1, torch.tensor([5, 1300]), torch.inf),
    "a part of wider rows": lambda logits: logits[:, :1100],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_unusual_logits_are_chosen_as_by_pytorch(shape: str) -> None:
    """Guards ties, of which the lowest token wins, and logits that are masked or no numbers."""
    logits = SHAPES[shape](torch.randn(4, 1500, generator=torch.Generator().manual_seed(3)))
    for temperature in (0.0, 0.3, 1.0):
        alike(logits, rows_of(4, temperature), 2)
