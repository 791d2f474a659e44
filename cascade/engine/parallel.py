"""One model over several processes: each rank holds a share of the weights, and of every session's keys and values.

Rank 0 leads: it tells the others which rows a pass has, and all run it together by Transformers' tensor-parallel plans. Logits
are whole on every rank; only the leader's are used. A pass that fails anywhere ends all ranks: nobody knows how far the others
came, and a new start is safe.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore  # as torch.distributed has them
from transformers import PreTrainedModel

from cascade.engine.adapters import AdaptedModel
from cascade.engine.attention import Contiguous
from cascade.engine.checkpoint import rank_problem, reason
from cascade.engine.contiguous_cache import Cache, Fork
from cascade.engine.loading import load
from cascade.engine.model import Model
from cascade.engine.sharing import sharing_problem
from cascade.errors import ModelError
from cascade.params import SamplingParams
from cascade.scorer import Row

LOCAL_RANK = "LOCAL_RANK"  # which of the GPUs that it sees is a process's own, as Transformers asks, too; the first by default
START_TIMEOUT = timedelta(minutes=30)  # ranks load at different speeds
PARAMS = SamplingParams(temperature=0, seed=0)  # logits do not depend on them
END_S = 30.0  # for a process to end by itself: on a busy machine the interpreter alone takes some
ALONE = "a drafter that reads the model needs it whole: take one rank, or another drafter"
IDLE_TIMEOUT = timedelta(days=3650)  # without requests the others wait for the leader; that one is gone, they hear at once


@dataclass(frozen=True, slots=True)
class Order:
    """What the leader tells the others before a pass."""

    changes: tuple["Change", ...]  # to caches since the last pass
    rows: tuple[tuple[int, int, tuple[int, ...], int], ...]  # cache, start, tokens fed, num_scored
    adapter: str  # that all of them follow


Deed = Literal["free", "take", "fork", "join"]


class Change(NamedTuple):
    """What happened to the cache of a number: it was freed, took from another, or joined it; or it is a new fork of another."""

    what: Deed
    number: int
    other: int = 0
    positions: int = 0  # that it took, or before the fork


@dataclass(slots=True)
class Book:
    """The leader's numbers of caches, and what the others have yet to hear."""

    last: int = 0
    changes: list[Change] = field(default_factory=list)

    def number(self) -> int:
        """A new one."""
        self.last += 1
        return self.last

    def note(self, what: Deed, number: int, other: int = 0, positions: int = 0) -> None:
        """Have the others do the same."""
        self.changes.append(Change(what, number, other, positions))


class RankCache(Cache):
    """The leader's share of a session's keys and values; the other ranks keep theirs under the same number."""

    __slots__ = ("_book", "number")

    def __init__(self, book: Book) -> None:
        super().__init__()
        self._book = book
        self.number = book.number()

    def take(self, source: Any, positions: int) -> None:
        super().take(source, positions)
        self._book.note("take", self.number, source.number, positions)

    def fork(self, position: int) -> "RankFork":
        return RankFork(self, position, self._book)

    def join(self, fork: Any) -> None:
        self._book.note("join", self.number, fork.number)  # before the fork is freed
        super().join(fork)

    def free(self) -> None:
        super().free()
        self._book.note("free", self.number)


class RankFork(Fork):
    """The same for a fork of one."""

    __slots__ = ("_book", "number")

    def __init__(self, base: RankCache, position: int, book: Book) -> None:
        super().__init__(base, position)
        self._book = book
        self.number = book.number()
        book.note("fork", self.number, base.number, position)

    def free(self) -> None:
        super().free()
        self._book.note("free", self.number)


@dataclass(slots=True)
class Wire:
    """Orders from the leader to all, apart from the tensors of passes."""

    group: Any = field(default_factory=lambda: dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT))

    def send(self, order: Order | None) -> None:
        dist.broadcast_object_list([order], src=0, group=self.group)

    def receive(self) -> Order | None:
        """The next order, ``None`` when the leader closes."""
        box: list[Order | None] = [None]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


class LeadingModel(Model):
    """A model whose other ranks follow; see `cascade.scorer.Scorer`."""

    def __init__(self, network: PreTrainedModel, **options: Any) -> None:
        if options.get("head") is not None:
            raise ModelError(ALONE)
        self._wire: Wire | None = None  # while the probe runs, which every rank runs by itself
        self._book = Book()
        self._fallen = ""
        self._followers: list[subprocess.Popen[bytes]] = []
        # all ranks must run the same passes, so threads are not timed: each rank would time another number of them
        super().__init__(network, attention=Contiguous(), num_threads=torch.get_num_threads(), **options)
        self._book.changes.clear()
        self._wire = Wire()

    @classmethod
    def launch(cls, source: str, ranks: int, *, adapters: Mapping[str, str] = {}, **options: Any) -> "LeadingModel":
        """Start ``ranks - 1`` processes on this machine and lead them; ``options`` are those of `cascade.engine.loading.load`.

        ``adapters`` are for `cascade.engine.adapters.AdaptedModel`. Raises `ModelError`. A process leads one model.
        """
        check_ranks(source, ranks, adapters=adapters, **options)
        if 0 < (seen := torch.cuda.device_count()) < ranks:
            raise ModelError(
                f"{source!r} is to be shared by {ranks} ranks, and {seen} GPUs are seen: set tensor_parallel_size to {seen}"
            )
        store, address = rendezvous("127.0.0.1", ranks)
        command = [sys.executable, "-m", "cascade.engine.parallel", address, str(ranks)]
        followers = [
            subprocess.Popen(
                [*command, str(rank), json.dumps({"source": source, "adapters": dict(adapters), **options})],
                env=os.environ | {LOCAL_RANK: str(rank)},
            )
            for rank in range(1, ranks)
        ]
        try:
            model = cls.lead(store, ranks, source, adapters=adapters, **options)
        except BaseException:
            _end(followers)
            raise
        model._followers = followers
        return model

    @classmethod
    def lead(
        cls,
        store: Store,
        ranks: int,
        source: str,
        *,
        adapters: Mapping[str, str] = {},
        memory: Mapping[str, Any] = {},
        **options: Any,
    ) -> "LeadingModel":
        """Join as rank 0 and load; returns when all ranks have loaded. ``memory`` is what `Model` takes for its caches."""
        _join(store, 0, ranks)
        try:
            network = load(source, ranks=ranks, **options)
            return AdaptedLeadingModel(network, adapters=adapters, **memory) if adapters else cls(network, **memory)
        except BaseException:
            dist.destroy_process_group()
            raise

    @property
    def healthy(self) -> bool:
        """All ranks are there, as far as the last pass tells."""
        return not self._fallen and all(follower.poll() is None for follower in self._followers)

    def new_cache(self) -> RankCache:
        """Keys and values of a new session."""
        return RankCache(self._book)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Logits ``[sum of num_scored, vocab_size]`` of the rows' last positions; `ModelError` for ever once a rank is lost."""
        if self._wire is None:
            return super().logits(rows)
        if self._fallen:
            raise ModelError(f"A rank of the model was lost: {self._fallen}")
        told = tuple((r.cache.number, r.start, tuple(r.fed), r.num_scored) for r in rows)
        changes, self._book.changes = tuple(self._book.changes), []
        try:
            self._wire.send(Order(changes, told, rows[0].params.adapter))
            return super().logits(rows)
        except Exception as error:  # of torch or the network
            self._fallen = reason(error)
            raise ModelError(f"A pass over several ranks failed: {self._fallen}") from error

    def close(self) -> None:
        """Send the others home."""
        if self._wire is not None and not self._fallen:
            with suppress(RuntimeError):  # they are gone already
                self._wire.send(None)
        self._wire, self._fallen = None, "closed"
        with suppress(RuntimeError, AssertionError):
            dist.destroy_process_group()
        _end(self._followers)


class AdaptedLeadingModel(LeadingModel, AdaptedModel):
    """A model with adapters whose other ranks follow; their weights are shared out like those they add to."""


def follow(address: str, rank: int, ranks: int, source: str, *, adapters: Mapping[str, str] = {}, **options: Any) -> None:
    """Be one of the other ranks, until the leader closes or anything fails."""
    host, _, port = address.rpartition(":")
    _join(TCPStore(host, int(port), ranks, is_master=False, timeout=START_TIMEOUT), rank, ranks)
    network = load(source, ranks=ranks, **options)
    alike: dict[str, Any] = {"attention": Contiguous(), "num_threads": torch.get_num_threads()}  # as the leader's
    model = AdaptedModel(network, adapters, **alike) if adapters else Model(network, **alike)
    caches: dict[int, Cache | Fork] = {}
    wire = Wire()
    while (order := wire.receive()) is not None:
        for change in order.changes:
            mirror(caches, change)
        rows = [
            Row(caches.setdefault(number, Cache()), start, tokens, own, PARAMS) for number, start, tokens, own in order.rows
        ]
        if isinstance(model, AdaptedModel):
            model.switch(order.adapter)
        model.logits(rows)
    dist.destroy_process_group()


def mirror(caches: dict[int, Any], change: Change) -> None:
    """Do with a follower's caches, and forks of them, what the leader did with its own."""
    what, number, other, positions = change
    if what == "free":
        caches.pop(number, None)
    elif what == "fork":
        caches[number] = caches.setdefault(other, Cache()).fork(positions)
    elif what == "take":
        caches.setdefault(number, Cache()).take(caches.setdefault(other, Cache()), positions)
    else:
        caches.setdefault(number, Cache()).join(caches[other])


def check_ranks(source: str, ranks: int, *, adapters: Mapping[str, str] = {}, **options: Any) -> None:
    """Raise `ModelError` if ``ranks`` cannot share the model of ``source``."""
    if options.get("drafter") is not None:
        raise ModelError(ALONE)
    if problem := sharing_problem(ranks, options.get("quantization"), adapters):
        raise ModelError(problem)
    known = {name: options[name] for name in ("revision", "trust_remote_code") if name in options}
    if problem := rank_problem(source, ranks, **known):
        raise ModelError(problem)


def rendezvous(host: str, ranks: int) -> tuple[Store, str]:
    """Where ranks meet: the leader's store and its address."""
    store = TCPStore(host, 0, ranks, is_master=True, wait_for_workers=False, timeout=START_TIMEOUT)
    return store, f"{host}:{store.port}"


def _join(store: Store, rank: int, ranks: int) -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get(LOCAL_RANK, 0)))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=START_TIMEOUT)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    where, number, me, arguments = sys.argv[1:]
    follow(where, int(me), int(number), **json.loads(arguments))
