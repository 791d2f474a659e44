"""Passes of a few tokens as CUDA graphs: the forward, sampling and noise included, with one copy in and one read out.

A graph is captured for each *bucket*: so many rows of so many tokens. A pass is put into the smallest bucket that holds it,
with every row's tokens at the end of its places; what is left over writes to the scratch block and is not read. A row of one
token feeds its own token back on the device, so that a tier with nobody below it gets several from one launch.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from cascade.engine.attention import BlockTables, Paged, Windows
from cascade.engine.checkpoint import reason
from cascade.engine.paged_cache import SCRATCH
from cascade.engine.sampling import FILTERED, GREEDY, NOISY, Choice, demand, own_tokens_of, runner_ups, with_runner_ups
from cascade.messages import RUNNER_UPS
from cascade.params import SamplingParams
from cascade.scorer import Row, Scored

log = logging.getLogger(__name__)

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
TOKEN_COUNTS = (1, 2, 4, 8, 16, 24)  # of a row
MAX_TOKENS = 256  # tokens of a bucket
MAX_SAMPLED = 32  # tokens up to which sampling is captured, too: its memory is some times their logits
STEPS = 4  # own tokens of one launch, at most
WARM_UPS = 2

_capturing = threading.Lock()  # CUDA takes one capture at a time in a process

Task = Callable[[], None]
Capture = Callable[[Task], Task]
"""Takes a task on static tensors and returns one that repeats it. It may run the task, whatever the tensors hold."""


def eager(work: Task) -> Task:
    """A capture that only calls the task again. For tests on devices without graphs."""
    work()
    return work


class Watch(TorchDispatchMode):
    """Raises `RuntimeError` at operations that cannot be captured because the host waits for their result.

    Finds them on every device before a capture begins: one that fails half-way leaves PyTorch's memory in disorder.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func.namespace == "aten" and set(types) <= {FakeTensor}:
            # in inference mode it sees operations that are made of others; what quantised weights make of them is theirs
            with self:
                out = func.decompose(*args, **options)
            if out is not NotImplemented:
                return out
        if _reads(func, args):
            raise RuntimeError(f"{func} looks at numbers on the host")
        out = func(*args, **options)
        tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)]
        if "copy" in str(func) and len({tensor.device.type for tensor in tensors}) > 1:
            raise RuntimeError(f"{func} copies between host and device")
        return out


def _reads(func: Any, args: Any) -> bool:
    """Whether an operation has to look at numbers before it can return."""
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        masks = any(leaf is not None and leaf.dtype in (torch.bool, torch.uint8) for leaf in args[1])
        return masks and (len(args) == 2 or args[2].numel() > 1)  # one number is put where a mask says, without counting
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


class Recorder:
    """Captures CUDA graphs, whose temporary memory is shared: they never run at the same time.

    Captured on a stream of their own, the graphs have cuBLAS's workspace in that memory, too: nobody can take it away.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._warming, self._stream = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def __call__(self, work: Task) -> Task:
        current = torch.cuda.current_stream(self._device)
        with _capturing, torch.cuda.stream(current):  # which a capture that fails does not put back
            return self._capture(work, current)

    def _capture(self, work: Task, current: torch.cuda.Stream) -> Task:
        self._warming.wait_stream(current)
        with torch.cuda.stream(self._warming):
            with Watch():  # type: ignore[no-untyped-call]  # as PyTorch has it
                work()
            for _ in range(WARM_UPS):  # libraries set themselves up in their first calls
                work()
        current.wait_stream(self._warming)
        graph = torch.cuda.CUDAGraph()
        # other tiers of the process may run meanwhile, in threads of their own
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        replay: Task = graph.replay
        return replay


@dataclass(frozen=True, slots=True)
class Bucket:
    """Passes of up to so many rows of up to so many tokens each."""

    rows: int
    tokens: int

    @property
    def size(self) -> int:
        return self.rows * self.tokens


BUCKETS = tuple(bucket for rows in ROW_COUNTS for tokens in TOKEN_COUNTS if (bucket := Bucket(rows, tokens)).size <= MAX_TOKENS)


def bucket_for(rows: int, tokens: int, buckets: Sequence[Bucket] = BUCKETS) -> Bucket | None:
    """The smallest bucket for ``rows`` rows of at most ``tokens`` tokens."""
    fitting = (bucket for bucket in buckets if bucket.rows >= rows and bucket.tokens >= tokens)
    return min(fitting, key=lambda bucket: bucket.size, default=None)


class Inputs:
    """Static tensors that a pass reads, and their counterparts on the host: one copy for the integers, one for the others."""

    def __init__(self, device: torch.device) -> None:
        rows = ROW_COUNTS[-1]
        whole = {"ids": MAX_TOKENS, "starts": rows, "counts": rows, "seeds": rows, "top_k": rows, "step": 1}
        real = dict.fromkeys(("temperature", "top_p", "least"), rows)
        pinned = device.type == "cuda"
        self._pairs = [
            (
                torch.zeros(sum(sizes.values()), dtype=dtype, pin_memory=pinned),
                torch.zeros(sum(sizes.values()), dtype=dtype, device=device),
            )
            for sizes, dtype in ((whole, torch.int64), (real, torch.float32))
        ]
        self.host: dict[str, Any] = {}
        self.device: dict[str, Tensor] = {}
        for sizes, (here, there) in zip((whole, real), self._pairs, strict=True):
            self.host |= dict(zip(sizes, (part.numpy() for part in here.split(list(sizes.values()))), strict=True))
            self.device |= dict(zip(sizes, there.split(list(sizes.values())), strict=True))
        self.host["counts"][:] = 1  # rows without a session have a token, too: no kernel meets an empty row
        self.upload(FILTERED)

    def upload(self, kind: int) -> None:
        """Copy to the device what passes of this kind read; the host's side is free again once the pass was read."""
        for here, there in self._pairs[: 1 if kind == GREEDY else 2]:
            there.copy_(here, non_blocking=True)


class Graphs:
    """The captured passes of one model.

    ``forward`` takes ids and positions ``[1, n]``, the places ``[k]`` whose logits are wanted, and what the layers are given;
    it returns logits ``[k, vocab_size]``.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, Tensor, Any], Tensor],
        attention: Paged,
        windows: Windows,
        *,
        vocab_size: int,
        context_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._attention = attention
        self._windows = windows
        self._block = attention.blocks.block
        self._buckets = [bucket for bucket in BUCKETS if bucket.size <= attention.most]
        self._widths = attention.widths(-(-context_len // self._block) + 1)  # of tables, in blocks
        self._width = self._widths[-1]
        self._inputs = Inputs(device)
        self._tables = torch.full((ROW_COUNTS[-1], self._width), SCRATCH, dtype=torch.int32, device=device)
        self._held = [0] * ROW_COUNTS[-1]  # versions of the tables that are there
        self._logits = torch.zeros(MAX_TOKENS, vocab_size, dtype=dtype, device=device)
        # own tokens of each step, then the first one's runner-ups, see `with_runner_ups`
        self._said = torch.zeros(STEPS + 2 * RUNNER_UPS, MAX_TOKENS, dtype=torch.int64, device=device)
        self._places = torch.arange(MAX_TOKENS, device=device)
        ends = ROW_COUNTS[-1] + 1
        self._ends = {n: torch.arange(0, ends * n, n, dtype=torch.int32, device=device) for n in TOKEN_COUNTS}
        self._forwards: dict[tuple[Bucket, int], Task] = {}
        self._samplers: dict[tuple[Bucket, int, int], Task] = {}

    @torch.inference_mode()
    def record(self, capture: Capture) -> bool:
        """Capture all buckets, with a progress bar; False if the model cannot be captured."""
        try:
            for bucket in tqdm(self._buckets, desc="Capturing passes", disable=capture is eager):
                for width in self._widths:
                    self._forwards[bucket, width] = capture(partial(self._score, bucket, width))
                for kind, number in product((GREEDY, NOISY, FILTERED), (0, RUNNER_UPS)):
                    self._inputs.upload(FILTERED)  # it has counted steps
                    work = partial(self._sample, bucket, kind, number)
                    self._samplers[bucket, kind, number] = _captured(capture, work) if bucket.size <= MAX_SAMPLED else work
        except RuntimeError as error:  # some models look at numbers on the host; or memory is short
            log.warning("Passes are not captured: %s", reason(error))
            return False
        return True

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> list[Scored] | None:
        """Own tokens of each row, with one host read; None for a pass that has no bucket."""
        bucket = bucket_for(len(rows), max(len(row.fed) for row in rows), self._buckets)
        if bucket is None or any(row.state is not None or row.draw is not None for row in rows):
            return None
        steps = min(STEPS, 1 + min(row.ahead for row in rows)) if bucket.tokens == 1 else 1
        kind = max(demand(row.params) for row in rows)
        self._fill(rows, bucket, steps)
        self._inputs.upload(kind)
        needed = max(row.start + len(row.fed) for row in rows) + steps - 1  # positions
        width = next((width for width in self._widths if needed <= width * self._block), self._width)
        number = RUNNER_UPS if any(row.runner_ups for row in rows) else 0
        forward = self._forwards[bucket, width]
        for step in range(steps):
            forward()
            self._samplers[bucket, kind, 0 if step else number]()
        said = self._said[: STEPS + 2 * number if number else steps, : bucket.size].tolist()
        return list(_split(rows, bucket, steps, said))

    def _fill(self, rows: Sequence[Row], bucket: Bucket, steps: int) -> None:
        host, size = self._inputs.host, bucket.tokens
        host["step"][0] = 0
        for place, row in enumerate(rows):
            count = len(row.fed)
            row.cache.prepare(row.start, row.start + count + steps - 1)
            self._place(place, row.cache.version, row.cache.table)
            host["ids"][(place + 1) * size - count : (place + 1) * size] = row.fed
            host["starts"][place], host["counts"][place] = row.start, count
            if demand(row.params) != GREEDY:
                self._fill_choice(place, row.params)
            host["temperature"][place] = row.params.temperature
        for place in range(len(rows), bucket.rows):
            self._place(place, 0, ())
            host["starts"][place], host["counts"][place], host["temperature"][place] = 0, 1, 0.0

    def _fill_choice(self, place: int, params: SamplingParams) -> None:
        host = self._inputs.host
        choice = Choice.of(params, self._logits.shape[1])
        host["seeds"][place], host["top_k"][place] = choice.seed, choice.top_k
        host["top_p"][place], host["least"][place] = choice.top_p, choice.least

    def _place(self, place: int, version: int, table: Sequence[int]) -> None:
        """Bring a session's table to a row; it is there already unless sessions or their blocks have changed."""
        if self._held[place] != version:
            new = torch.tensor([*table[: self._width]] or [SCRATCH], dtype=torch.int32)
            self._tables[place, : len(new)].copy_(new, non_blocking=True)
            self._held[place] = version

    # what is captured: no value of a tensor is looked at, and what changes from pass to pass is in tensors

    def _positions(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Positions ``[rows, tokens]``, negative before the first of a text, and the row's first ``[rows, 1]``."""
        inputs = self._inputs.device
        starts = inputs["starts"][: bucket.rows, None]
        ends = starts + inputs["counts"][: bucket.rows, None]
        return ends - bucket.tokens + self._places[: bucket.tokens], starts

    def _score(self, bucket: Bucket, width: int) -> None:
        positions, starts = self._positions(bucket)
        tables, real = self._tables[: bucket.rows, :width], positions >= starts
        positions = positions.clamp(min=0)
        blocks = tables.gather(1, positions // self._block)
        slots = torch.where(real, blocks * self._block + positions % self._block, self._places[: bucket.tokens] % self._block)
        lengths = positions[:, -1].int() + 1
        ends = self._ends[bucket.tokens][: bucket.rows + 1]
        rows = BlockTables(slots.flatten(), ends, lengths, tables, bucket.tokens, width * self._block)
        logits = self._forward(
            self._inputs.device["ids"][None, : bucket.size],
            positions.view(1, -1),
            self._places[: bucket.size],
            self._attention.over(rows, self._windows),
        )
        self._logits[: bucket.size].copy_(logits)

    def _sample(self, bucket: Bucket, kind: int, number: int) -> None:
        inputs, logits = self._inputs.device, self._logits[: bucket.size]
        if kind == GREEDY:
            own = logits.argmax(-1)
            said = with_runner_ups(own, logits.float(), number) if number else own[None]
        else:
            positions, _ = self._positions(bucket)
            names = ("seeds", "top_k", "temperature", "top_p", "least")
            wide = (inputs[name][: bucket.rows, None].expand(-1, bucket.tokens).reshape(-1) for name in names)
            said = own_tokens_of(logits, positions.view(-1) + 1, *wide, filtered=kind == FILTERED, number=number)
            own = said[0]
        self._said[:STEPS, : bucket.size].index_copy_(0, inputs["step"], own[None])
        if number:
            self._said[STEPS:, : bucket.size].copy_(said[1:])
        if bucket.tokens == 1:  # its own token is what a row scores next
            inputs["ids"][: bucket.rows].copy_(own)
            inputs["starts"][: bucket.rows].add_(1)
            inputs["step"].add_(1)


def _captured(capture: Capture, work: Task) -> Task:
    """The captured task, or the task itself where it cannot be captured: neither makes the host wait."""
    try:
        return capture(work)
    except RuntimeError as error:
        log.info("Choosing tokens is not captured: %s", reason(error))
        return work


def _split(rows: Sequence[Row], bucket: Bucket, steps: int, said: list[list[int]]) -> Iterator[Scored]:
    """What each row is told: own tokens of ``steps``, and runner-ups of the first if they were asked for."""
    ahead = said[1:steps]
    for place, row in enumerate(rows):
        end = (place + 1) * bucket.tokens
        part = slice(end - row.num_scored, end)
        next_ = runner_ups([each[part] for each in (said[0], *said[STEPS:])], row.runner_ups) if row.runner_ups else ()
        yield Scored(said[0][part], tuple(step[place] for step in ahead), runner_ups=next_)
