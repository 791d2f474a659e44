"""What stands between products: norms, rotary positions, gated activations; each one sweep over its numbers."""

import math
from typing import Any

from numba import float32
from torch import Tensor

from cascade.native.attention import LEAST, exponential
from cascade.native.jit import arguments, bits, floats, inlined, integer, kernel, num_threads, real, run, swept, thread_num

SILU, GELU_TANH = 0, 1  # activations


@swept
def _norm_row(x: int, weight: int, out: int, size: int, epsilon: float, offset: float) -> None:
    numbers, scales, to = floats(x), floats(weight), floats(out)
    squares = float32(0.0)
    for place in range(size):
        squares += numbers[place] * numbers[place]
    share = float32(1.0) / math.sqrt(squares / float32(size) + epsilon)
    for place in range(size):
        to[place] = numbers[place] * share * (offset + scales[place])


@kernel
def _rms_norm(given: int) -> None:
    tokens, heads, size = integer(given, 0), integer(given, 1), integer(given, 2)
    epsilon, offset = real(integer(given, 7)), real(integer(given, 8))
    here, threads = thread_num(), num_threads()
    for token in range(tokens * here // threads, tokens * (here + 1) // threads):
        for head in range(heads):
            x = integer(given, 3) + (token * integer(given, 4) + head * size) * 4
            out = integer(given, 5) + (token * integer(given, 6) + head * size) * 4
            _norm_row(x, integer(given, 9), out, size, epsilon, offset)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """``x / rms(x) * (offset + weight)`` over parts of rows as long as ``weight``.

    ``x`` ``[tokens, n * size]`` float32, its rows apart or not; returns as many.
    """
    tokens, size = x.shape[0], weight.shape[0]
    to = x.new_empty(x.shape)
    numbers = (tokens, x.shape[1] // size, size, x.data_ptr(), x.stride(0), to.data_ptr(), to.stride(0))
    run(_rms_norm, arguments(*numbers, bits(epsilon), bits(offset), weight.data_ptr()), x.numel())
    return to


@swept
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


def rotate(x: Tensor, size: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads of ``size`` by the angles of their token, in place; halves of a head are the pairs (Su et al., RoFormer).

    ``x`` ``[tokens, heads * size]``, ``cos`` and ``sin`` ``[tokens, turned]`` float32 with ``turned <= size``: the rest of a
    head stays.
    """
    angles = (cos.contiguous(), sin.contiguous())
    numbers = (x.shape[0], x.shape[1] // size, size, cos.shape[1], x.data_ptr(), x.stride(0))
    run(_rotate, arguments(*numbers, *(angle.data_ptr() for angle in angles)), x.numel())
    return x


@inlined
def _sigmoid(x: float) -> Any:
    small = exponential(max(-abs(x), float32(LEAST)))
    return (float32(1.0) if x >= 0 else small) / (float32(1.0) + small)


@swept
def _silu_row(gate: int, up: int, out: int, size: int) -> None:
    gates, ups, to = floats(gate), floats(up), floats(out)
    for place in range(size):
        to[place] = gates[place] * _sigmoid(gates[place]) * ups[place]


@swept
def _gelu_row(gate: int, up: int, out: int, size: int) -> None:
    gates, ups, to = floats(gate), floats(up), floats(out)
    for place in range(size):
        x = gates[place]
        # tanh(y) is 2 sigmoid(2 y) - 1
        inner = float32(1.5957691216) * (x + float32(0.044715) * x * x * x)
        to[place] = x * _sigmoid(inner) * ups[place]


@kernel
def _gate(given: int) -> None:
    tokens, size, stride = integer(given, 0), integer(given, 1), integer(given, 2)
    here, threads = thread_num(), num_threads()
    for token in range(tokens * here // threads, tokens * (here + 1) // threads):
        at, out = token * stride * 4, integer(given, 5) + token * size * 4
        if integer(given, 6) == SILU:
            _silu_row(integer(given, 3) + at, integer(given, 4) + at, out, size)
        else:
            _gelu_row(integer(given, 3) + at, integer(given, 4) + at, out, size)


def gated(x: Tensor, activation: int) -> Tensor:
    """``activation(gate) * up`` of ``[tokens, 2 * size]`` float32, whose first half is the gate: ``[tokens, size]``."""
    tokens, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(tokens, size)
    numbers = (x.stride(0), x.data_ptr(), x.data_ptr() + 4 * size, out.data_ptr(), activation)
    run(_gate, arguments(tokens, size, *numbers), x.numel())
    return out
