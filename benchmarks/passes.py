"""What a pass is made of: products of a few rows against what memory gives, whole passes, and what a tier adds to them.

    make bench-passes

Ways take turns, and of each the best run counts: a busy machine only ever adds. Matrices are together far larger than the
caches, as those of a model are. Gigabytes are those of the weights as they are held, so ours of weights in bfloat16 has half of
them to read. Beside them, in the same run: what one sweep over a large tensor reads, passes of SmolLM2-135M-Instruct, and what
a tier adds when its model needs nothing. OMP_NUM_THREADS is honoured. The last line is one JSON document.
"""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.baseline import load
from benchmarks.document import console, finish, parsed, parser, stamp
from benchmarks.toy import ToyModel
from cascade import family
from cascade.cpu.linear import Linear
from cascade.engine.devices import has_bfloat16
from cascade.engine.model import Model
from cascade.engine.threads import apart
from cascade.messages import Close, Link, Message, Open, Proposal
from cascade.params import SamplingParams
from cascade.scorer import Row, Scored
from cascade.tier.tier import Tier

DTYPES = ("float32", "bfloat16") if has_bfloat16() else ("float32",)  # where it is slow nobody would serve it
SHAPES = {family.MODEL: (576, 1536), "8 B": (4096, 4096)}  # in and out features
ROWS = (1, 2, 4, 8, 16)
NBYTES = 150 * 2**20  # of one way's matrices
SWEEP = 64 * 2**20  # numbers of the large tensor
ROUNDS = 7
PASSES = 30
PASSES_OF_A_TIER = 2000
PREFIX = 150  # positions after which passes are timed

Way: TypeAlias = Callable[[Tensor], Tensor]


def ways(depth: int, width: int) -> dict[str, tuple[list[Way], int]]:
    """By name, ways to multiply with as many matrices as are large together, and the bytes of their weights."""
    count = max(1, NBYTES // (4 * depth * width))
    weights = [torch.randn(width, depth) for _ in range(count)]
    halves = [weight.bfloat16() for weight in weights]
    found: dict[str, list[Way]] = {
        "ours": [Linear(weight) for weight in weights],
        "ours, widened": [Linear(half.float()) for half in halves],
        "pytorch": [_plain(weight) for weight in weights],
        "onednn": [_in_onednns_order(weight) for weight in weights],
    }
    if has_bfloat16():
        found["onednn bfloat16"] = [_in_halves(_in_onednns_order(half)) for half in halves]
    nbytes = count * depth * width * 4
    return {name: (all, nbytes // 2 if name in ("ours, widened", "onednn bfloat16") else nbytes) for name, all in found.items()}


def _in_onednns_order(weight: Tensor) -> Way:
    """Put into that order once, for eight rows."""
    ordered = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return lambda x: torch.ops.mkldnn._linear_pointwise.default(x, ordered, None, "none", [], "")


def _plain(weight: Tensor) -> Way:
    return lambda x: F.linear(x, weight)


def _in_halves(way: Way) -> Way:
    return lambda x: way(x.bfloat16())


def best(works: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of each, the best of some turns."""
    found = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            found[name] = min(found[name], time.perf_counter() - begin)
    return found


def products(depth: int, width: int) -> dict[str, dict[str, float]]:
    """Gigabytes of weights in a second, by way and number of rows; and of those a sweep over as many numbers."""
    known, large = ways(depth, width), torch.randn(SWEEP)
    table: dict[str, dict[str, float]] = {name: {} for name in (*known, "sweep")}
    for rows in ROWS:
        x = torch.randn(rows, depth)
        works: dict[str, Callable[[], object]] = {name: _all(matrices, x) for name, (matrices, _) in known.items()}
        for name, seconds in best(works | {"sweep": large.sum}).items():
            nbytes = large.nbytes if name == "sweep" else known[name][1]
            table[name][str(rows)] = round(nbytes / seconds / 1e9, 1)
    return table


def _all(matrices: list[Way], x: Tensor) -> Callable[[], object]:
    return lambda: [times(x) for times in matrices]


def pass_ms(model: Model, sizes: Sequence[int], rounds: int) -> dict[str, float]:
    """Milliseconds of passes of so many tokens after `PREFIX` positions, all scored."""
    params, cache = SamplingParams(temperature=0, seed=0), model.new_cache()
    text = [token % model.vocab_size for token in range(5, 5 + PREFIX)]
    model.run([Row(cache, 0, text, 1, params)])
    rows = {str(n): Row(cache, PREFIX, text[:n], n, params) for n in sizes}
    found = best({n: lambda row=row: model.run([row]) for n, row in rows.items()}, rounds)  # type: ignore[misc]
    cache.free()
    return {n: round(1000 * seconds, 2) for n, seconds in found.items()}


def passes(source: str, dtype: str) -> dict[str, float]:
    """`pass_ms` of a model, and how many parameters it has."""
    model = Model(load(source, dtype))
    return pass_ms(model, ROWS, PASSES) | {"parameters": model.num_parameters}


class Idle(ToyModel):
    """A model that needs no time."""

    def run(self, rows: Sequence[Row]) -> list[Scored]:
        return [Scored([7] * row.num_scored) for row in rows]


def overhead_us() -> float:
    """Microseconds that a tier needs for a pass of one session, everything but the model: schedule, advance, messages."""
    heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
    tier = Tier("idle", 0, Idle(context_len=PASSES_OF_A_TIER + 16))
    tier.start()
    seconds = []
    for session in map(str, range(ROUNDS)):
        params = SamplingParams(max_tokens=PASSES_OF_A_TIER, temperature=0, seed=0, ignore_eos=True)
        begin, end = time.perf_counter(), 0
        tier.post([Open(session, (1,), 1, params, window=PASSES_OF_A_TIER)], _Hear(heard))
        while end < PASSES_OF_A_TIER + 1:
            message = heard.get()
            assert isinstance(message, Proposal), message
            end = message.start + len(message.draft)
        seconds.append(time.perf_counter() - begin)
        tier.post([Close(session)])
    tier.close()
    return round(1e6 * min(seconds) / PASSES_OF_A_TIER, 1)


class _Hear(Link):
    def __init__(self, heard: "queue.SimpleQueue[Message]") -> None:
        self._heard = heard

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._heard.put(message)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("passes", "What a pass is made of.", quick=False), arguments)
    source = apart(family.full)  # this thread must not compute, see `cascade.engine.threads.apart`
    speeds, times = {}, {}
    for name, (depth, width) in SHAPES.items():
        with torch.inference_mode():
            speeds[name] = apart(lambda depth=depth, width=width: products(depth, width))  # type: ignore[misc]
        console.print(f"[bold]{name}[/] {depth} x {width}, GB/s by rows", speeds[name])
    for dtype in DTYPES:
        times[dtype] = apart(lambda dtype=dtype: passes(source, dtype))  # type: ignore[misc]
        console.print(f"[bold]{family.MODEL} {dtype}[/], ms by tokens", times[dtype])
    sweep = max(speed["sweep"]["1"] for speed in speeds.values())
    reads = {name: 1000 * one["parameters"] * (4 if name == "float32" else 2) / sweep / 1e9 for name, one in times.items()}
    document = {
        "gigabytes_per_second": speeds,
        "pass_ms": times,
        "pass_vs_reading": {name: round(one["1"] / reads[name], 2) for name, one in times.items()},
        "pass_8_vs_1": {name: round(one["8"] / one["1"], 2) for name, one in times.items()},
        "tier_overhead_us": overhead_us(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **stamp(),
    }
    finish(document, document, chosen.results)


if __name__ == "__main__":
    main()
