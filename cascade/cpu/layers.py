"""Kernels between products: norms, rotary embeddings, gated activations, sums."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from numba import float32
from torch import Tensor

from cascade.cpu.attention import LEAST, exponential
from cascade.cpu.jit import Step, bits, floats, inlined, integer, kernel, num_threads, real, swept, thread_num


class Rows(NamedTuple):
    """Rows of float32: the address of the first one, and their stride. Each row is contiguous."""

    address: int
    stride: int  # between rows, in elements

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """The rows of ``[rows, size]``."""
        return cls(x.data_ptr(), x.stride(0))

    def behind(self, place: int) -> "Rows":
        """The rows from element ``place`` on."""
        return Rows(self.address + 4 * place, self.stride)


@swept
def _squares(x: int, size: int) -> Any:
    numbers, sum = floats(x), float32(0.0)
    for place in range(size):
        sum += numbers[place] * numbers[place]
    return sum


@inlined
def _norm_row(x: int, weight: int, out: int, size: int, epsilon: float) -> None:
    numbers, scales, to = floats(x), floats(weight), floats(out)
    share = float32(1.0) / math.sqrt(_squares(x, size) / float32(size) + epsilon)
    for place in range(size):
        to[place] = numbers[place] * share * scales[place]


@kernel
def _rms_norm(given: int) -> None:
    tokens, heads, size = integer(given, 0), integer(given, 1), integer(given, 2)
    epsilon = real(integer(given, 7))
    here, threads = thread_num(), num_threads()
    for token in range(tokens * here // threads, tokens * (here + 1) // threads):
        for head in range(heads):
            x = integer(given, 3) + (token * integer(given, 4) + head * size) * 4
            out = integer(given, 5) + (token * integer(given, 6) + head * size) * 4
            _norm_row(x, integer(given, 8), out, size, epsilon)


def norm_step(x: Rows, to: Rows, shape: Sequence[int], weight: Tensor, epsilon: float) -> Step:
    """``x / rms(x) * weight`` over each part of ``[tokens, n * size]`` with ``weight`` ``[size]``; ``to`` may be ``x``."""
    (tokens, width), size = shape, weight.shape[0]
    return Step(_rms_norm, (tokens, width // size, size, *x, *to, bits(epsilon), weight.data_ptr()))


@inlined
def _turn(x: int, cos: int, sin: int, half: int) -> None:
    numbers, cosines, sines = floats(x), floats(cos), floats(sin)
    for place in range(half):
        first, second = numbers[place], numbers[place + half]
        numbers[place] = first * cosines[place] - second * sines[place]
        numbers[place + half] = second * cosines[place + half] + first * sines[place + half]


@kernel
def _rotate(given: int) -> None:
    tokens, heads, size, turned = integer(given, 0), integer(given, 1), integer(given, 2), integer(given, 3)
    here, threads = thread_num(), num_threads()
    for token in range(tokens * here // threads, tokens * (here + 1) // threads):
        angles = token * turned * 4
        for head in range(heads):
            x = integer(given, 4) + (token * integer(given, 5) + head * size) * 4
            _turn(x, integer(given, 6) + angles, integer(given, 7) + angles, turned // 2)


def rotate_step(x: Rows, shape: Sequence[int], size: int, cos: Tensor, sin: Tensor) -> Step:
    """Rotate heads of ``size`` by the angles of their token, in place; a pair has one number of each half of a head (RoFormer).

    ``x`` ``[tokens, heads * size]``, ``cos`` and ``sin`` ``[tokens, turned]`` float32 without gaps, ``turned <= size``: the
    rest of a head is unchanged.
    """
    tokens, width = shape
    return Step(_rotate, (tokens, width // size, size, cos.shape[1], *x, cos.data_ptr(), sin.data_ptr()))


@inlined
def _sigmoid(x: float) -> Any:
    small = exponential(max(-abs(x), float32(LEAST)))
    return (float32(1.0) if x >= 0 else small) / (float32(1.0) + small)


@inlined
def _gate_row(gate: int, up: int, out: int, size: int) -> None:
    gates, ups, to = floats(gate), floats(up), floats(out)
    for place in range(size):
        to[place] = gates[place] * _sigmoid(gates[place]) * ups[place]


@kernel
def _gate(given: int) -> None:
    tokens, size, stride = integer(given, 0), integer(given, 1), integer(given, 2)
    here, threads = thread_num(), num_threads()
    for token in range(tokens * here // threads, tokens * (here + 1) // threads):
        at, out = token * stride * 4, integer(given, 5) + token * size * 4
        _gate_row(integer(given, 3) + at, integer(given, 4) + at, out, size)


def gate_step(x: Rows, to: int, shape: Sequence[int]) -> Step:
    """``silu(gate) * up`` of ``x`` ``[tokens, 2 * size]``, the gate first, to ``[tokens, size]`` at the address ``to``."""
    tokens, size = shape
    return Step(_gate, (tokens, size, x.stride, x.address, x.address + 4 * size, to))


@kernel
def _add(given: int) -> None:
    tokens, size, stride, other_stride = integer(given, 0), integer(given, 1), integer(given, 2), integer(given, 3)
    first, second, to = floats(integer(given, 4)), floats(integer(given, 5)), floats(integer(given, 6))
    here, threads = thread_num(), num_threads()
    for token in range(tokens * here // threads, tokens * (here + 1) // threads):
        for place in range(size):
            to[token * stride + place] = first[token * stride + place] + second[token * other_stride + place]


def add_step(first: int, second: Rows, to: int, shape: Sequence[int]) -> Step:
    """``first + second`` of ``shape`` ``[tokens, size]``, ``first`` and ``to`` contiguous and perhaps the same."""
    return Step(_add, (*shape, shape[1], second.stride, first, second.address, to))


def shift_step(x: Rows, tokens: int, bias: Tensor) -> Step:
    """Add ``bias`` ``[size]`` to each of ``tokens`` rows, in place."""
    return Step(_add, (tokens, bias.shape[0], x.stride, 0, x.address, bias.data_ptr(), x.address))
