"""What stands between products, where `tests/engine/test_pass.py` cannot look: extremes, places in memory, threads."""

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cascade.cpu.jit import BRIEF, run_step
from cascade.cpu.layers import Rows, add_step, gate_step, norm_step, rotate_step, shift_step
from cascade.cpu.program import Program


@pytest.mark.parametrize("rows", [1, 200])  # the last ones are more than a brief worker does
def test_gated_activations(rows: int) -> None:
    """Guards the exponentials far out, where one that overflows would make what is not a number."""
    x, gated = torch.randn(rows, 602, generator=torch.Generator().manual_seed(rows)) * 100, torch.empty(rows, 301)
    gate, up = x.split(301, dim=1)
    run_step(gate_step(Rows.of(x), gated.data_ptr(), gated.shape), x.numel())
    torch.testing.assert_close(gated, F.silu(gate) * up, rtol=1e-5, atol=1e-5)


def laid_out(rng: random.Random, buffer: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Copies of ``parts`` in ``buffer``, in any order and a few numbers apart."""
    copies, begin = list(parts), rng.randrange(9)
    for place in rng.sample(range(len(parts)), len(parts)):
        copies[place] = buffer[begin : begin + len(parts[place])].copy_(parts[place])
        begin += len(parts[place]) + rng.randrange(9)
    return copies


@pytest.mark.parametrize("size", [16, 32, 48, 96])
def test_bits_do_not_depend_on_where_rows_lie(size: int) -> None:
    """Guards exactness of short rows: near to each other they are not computed in vectors, and had other bits."""
    rng, noise = random.Random(size), torch.Generator().manual_seed(size)
    x, y, z = (torch.randn(size, generator=noise) for _ in range(3))
    wide, out, buffer, results = torch.cat((x, y)), torch.zeros(size), torch.zeros(16 * size), defaultdict(set)

    def rows(x: Tensor) -> Rows:
        return Rows.of(x[None])

    for _ in range(300):
        a, b, to = laid_out(rng, buffer, (x, y, out))
        run_step(norm_step(rows(a), rows(to), (1, size), b, 1e-5), size)
        results["norm"].add(to.numpy().tobytes())
        run_step(add_step(a.data_ptr(), rows(b), to.data_ptr(), (1, size)), size)
        results["sum"].add(to.numpy().tobytes())
        turned, cos, sin = laid_out(rng, buffer, (x, y, z))
        run_step(rotate_step(rows(turned), (1, size), size, cos[None], sin[None]), size)
        results["rotation"].add(turned.numpy().tobytes())
        a, to = laid_out(rng, buffer, (wide, out))
        run_step(gate_step(rows(a), to.data_ptr(), (1, size)), size)
        results["gate"].add(to.numpy().tobytes())
    assert {name: len(bits) for name, bits in results.items()} == dict.fromkeys(results, 1)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_program_is_its_steps_in_their_order(num_threads: int) -> None:
    """Guards steps against threads that are already at the next one: each reads what the other thread has just written."""
    tokens, size = 64, 384
    there, back = torch.randn(tokens, size), torch.empty(tokens, size)
    expected, steps = there, []
    for source, to in ((there, back), (back, there)) * 20:
        expected = expected + expected.flip(0)
        last = Rows(source.data_ptr() + 4 * size * (tokens - 1), -size)
        steps.append(add_step(source.data_ptr(), last, to.data_ptr(), source.shape))
    bias = torch.randn(size)
    steps.append(shift_step(Rows.of(there), tokens, bias))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        Program(steps, 2 * BRIEF).run()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(there, expected + bias)
