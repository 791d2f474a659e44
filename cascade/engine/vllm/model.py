"""A model on vLLM as a tier sees it: a `cascade.scorer.Scorer` over vLLM's blocks."""

import contextlib
import math
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cascade.drafters import DrafterSpec
from cascade.engine.adapter_folder import AdapterFolder
from cascade.engine.checkpoint import DTYPES, anatomy
from cascade.engine.devices import HOST_SHARE, UTILIZATION
from cascade.engine.draft_vocab import draft_ids
from cascade.engine.draft_vocab import tokens as draft_tokens
from cascade.engine.gguf import converted
from cascade.engine.memory import GIB, host_memory
from cascade.engine.model_config import read_config
from cascade.engine.sampling.processors import report
from cascade.engine.scoring import Packed, Report, asked, scored, unpacked
from cascade.engine.trees import run_trees
from cascade.engine.vllm import batch_invariant, installed, with_layers
from cascade.engine.vllm.blocks import RESERVED, Blocks, PagedCache
from cascade.engine.vllm.heads import readers, reading, speculative_config, with_drafts
from cascade.engine.vllm.worker import LAYERS, Batch, Coming, Facts
from cascade.engine.weights import shapes
from cascade.errors import ConfigError, InvalidRequest, ModelError, reason
from cascade.scorer import Row, Runs, Scored

_running: list[Any] = []  # engines of this process
_closed: list[Any] = []  # engines that wait until all are closed, see `_shut_down`
CHOSEN = {  # engine arguments that a tier sets
    "skip_tokenizer_init": True,
    "worker_extension_cls": "cascade.engine.vllm.worker.CascadeWorker",
    "enable_prefix_caching": False,
    "disable_hybrid_kv_cache_manager": True,
    "disable_log_stats": True,
}
LOADING_LAYERS = "cascade.engine.vllm.loader.CascadeWorker"  # the same worker, where layers are read
BESIDE = 2 * GIB  # what each of several models on a GPU needs for its context, passes and graphs
LEAST_CACHE = GIB // 4  # the least memory for keys and values: with less a tier is of no use
TIED = {"lm_head.weight"}  # a checkpoint may leave it out
OURS = {*CHOSEN, "model", "tokenizer", "enable_lora", "max_loras"}
OURS |= {"speculative_config", "pipeline_parallel_size", "data_parallel_size"}  # the cascade drafts; a tier has neither
# Environment variables for vLLM: its engine runs in this process, and its workers do not bind threads.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless ``options`` are engine arguments of vLLM that a user may set; needs vLLM."""
    if not installed():
        raise ConfigError("engine is 'vllm', which is not installed here: pip install '.[vllm]', or leave engine out")
    from vllm import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for name in options:
        if name in OURS:
            raise ConfigError(f"{name} is an engine argument of vLLM that a tier has no use for: remove it from engine_kwargs")
        if name not in known:
            raise ConfigError(f"{name} is no engine argument of this vLLM: see vllm.EngineArgs for their names")


def check_architectures(names: Sequence[str]) -> None:
    """Raise `ConfigError` if vLLM has no model for any of the architectures that a checkpoint names; needs vLLM."""
    from vllm import ModelRegistry

    if names and not {*names} & ModelRegistry.get_supported_archs():
        raise ConfigError(
            f"vLLM has no model for {names[0]}: set engine to 'cascade', or model_impl to 'transformers' for vLLM to try theirs"
        )


@dataclass(frozen=True, slots=True)
class Launched:
    """A pass under way, or one that `VllmModel.collect` begins."""

    rows: Sequence[Row]
    found: Any = None  # logits, own tokens, or own tokens that are `Coming`


class VllmModel(Runs):
    """A causal language model that vLLM runs; see `cascade.scorer.Scorer`.

    Logits of a text depend in their last bits on what shares its pass, unless vLLM runs batch-invariant
    (``VLLM_BATCH_INVARIANT=1``): `same_bits` says which.
    """

    def __init__(
        self,
        source: str,
        *,
        cache_tokens: int | None = None,
        adapters: Mapping[str, str] | None = None,
        folder: AdapterFolder | None = None,
        most: int = 16,
        draft: bool = False,
        drafter: DrafterSpec | None = None,
        layers: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Load from a path or the hub; raises `ModelError` if vLLM cannot, and `ConfigError` if it is not installed.

        ``cache_tokens`` positions of keys and values fit into memory; if ``None``, as many as vLLM finds room for. ``adapters``
        are paths or hub ids of LoRA adapters, by the names that `SamplingParams.adapter` has. Those of ``folder`` are loaded by
        the first pass that needs them, ``most`` at a time, from the folder's copies. A ``draft`` model says its draft
        vocabulary alone, and scores rows of an adapter that it has not without one. ``drafter`` is a head that guesses after
        its texts. Weights of other layers than ``layers`` are not read. ``options`` are vLLM's engine arguments by their own
        names (``dtype``, ``quantization``, ``max_model_len``, ...), see `check_options`.
        """
        options = dict(options or {})
        check_options(options)
        self._folder, self._draft, self._source = folder, draft, converted(source)
        self._said: list[int] | None = None  # its draft vocabulary, if that is all it says
        self._most = len(adapters or ()) if folder is None else most
        self.drafter = "" if drafter is None else drafter.kind
        if drafter is not None:
            options["speculative_config"] = speculative_config(drafter, self._source, layers)
        self._engine = _start(self._source, cache_tokens, options, self._most, layers)
        self._busy = threading.Lock()  # workers answer one call after the other
        _running.append(self._engine)
        facts: Facts = self._engine.collective_rpc("cascade_facts")[0]
        self._numbers: dict[str, int] = {}  # adapters' numbers by name, the least recently used first
        try:
            if facts.problem is not None:
                raise ModelError(f"{source!r} cannot be a tier on vLLM: {facts.problem}; set engine to 'cascade'")
            if draft:
                self._restrict(options.get("revision"), options.get("trust_remote_code", False))
            for name, adapter in (adapters or {}).items():
                self._add(name, adapter)
        except ModelError:
            _shut_down(self._engine)
            raise
        config = self._engine.vllm_config
        self._ranks: int = config.parallel_config.world_size
        self.device, self.dtype, self.num_parameters = facts.device, facts.dtype, facts.num_parameters
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.context_len: int = config.model_config.max_model_len
        self.same_bits, self._facts = batch_invariant(), facts
        self._blocks = Blocks(facts.num_blocks, facts.block)
        self.cache_tokens = (facts.num_blocks - RESERVED) * facts.block
        self.healthy = True
        # on a GPU tiers of one process do not wait for each other's passes
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # weights and caches are there then
        # with several ranks results come through pipes, which `launch` would wait for
        self._ahead = self.device.type == "cuda" and self._ranks == 1

    def _restrict(self, revision: str | None, trust_remote_code: bool) -> None:
        """Let a draft model say its draft vocabulary alone, if it has one; raises `ModelError` if its ids do not fit."""
        config = read_config(self._source, revision=revision, trust_remote_code=trust_remote_code)
        if (ids := draft_tokens(config, self._source, revision=revision)) is not None:
            self._said = ids.tolist()
            self._engine.collective_rpc("cascade_say", args=(self._said,))

    def _add(self, name: str, source: str) -> None:
        """Load an adapter, in place of the one that was not used for longest; raises `ModelError`."""
        from vllm.lora.request import LoRARequest

        if len(self._numbers) >= self._most:
            self._engine.remove_lora(self._numbers.pop(next(iter(self._numbers))))
        number = min({*range(1, self._most + 1)} - {*self._numbers.values()})
        try:
            self._engine.add_lora(LoRARequest(name, number, source))
        except Exception as error:  # a library may raise anything
            raise ModelError(f"The adapter {name!r} cannot be loaded from {source!r}: {reason(error)}") from error
        self._numbers[name] = number

    def _need(self, rows: Sequence[Row]) -> None:
        """Load the adapters of these rows that are missing; raises `InvalidRequest` if one cannot be loaded."""
        for name in dict.fromkeys(row.params.adapter for row in rows if row.params.adapter):
            if name in self._numbers:
                self._numbers[name] = self._numbers.pop(name)
                continue
            assert self._folder is not None, f"adapter {name!r} is not known"
            try:
                self._add(name, self._folder.place(name))
            except ModelError as error:
                raise InvalidRequest(str(error)) from error

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of those that are loaded."""
        return tuple(self._numbers)

    @property
    def summary(self) -> str:
        bits = "have the same bits in every pass" if self.same_bits else "may differ in their last bits from pass to pass"
        shared = f", {self._ranks} ranks" if self._ranks > 1 else ""
        place = f"{str(self.dtype).removeprefix('torch.')} on {self.device}, vLLM's {self._facts.backend}{shared}"
        return f"{place}, {self._facts.num_blocks} blocks of {self._facts.block}; logits {bits}"

    def new_cache(self) -> PagedCache:
        """Keys and values of a new session: a table of vLLM's blocks."""
        return PagedCache(self._blocks)

    def renew(self, source: str) -> None:
        """Go on with the weights of ``source`` from the next pass on, see `cascade.engine.model.Model.renew`.

        vLLM writes them over the old ones while no pass runs. Raises `ModelError` if their shapes differ, before anything is
        changed; or if vLLM cannot read them: some may be changed then, and the tier drafts worse until it gets whole weights.
        """
        source = converted(source)
        here, there = shapes(self._source), shapes(source)
        if wrong := next((name for name in sorted({*here, *there} - TIED) if here.get(name) != there.get(name)), None):
            raise ModelError(f"The weights of {source!r} cannot take the place of others: {wrong} is not the same there")
        if self._said is not None and draft_ids(source) != self._said:
            raise ModelError(f"The weights of {source!r} cannot take the place of others: they say other tokens")
        try:
            with self._busy:
                self._engine.collective_rpc("reload_weights", kwargs={"weights_path": source})
        except Exception as error:  # a library may raise anything
            raise ModelError(f"vLLM cannot take the weights of {source!r}: {reason(error)}") from error

    def launch(self, rows: Sequence[Row]) -> Launched:
        """See `cascade.scorer.Scorer`. A GPU works by itself from here on, processors in `collect`."""
        if not self._ahead or self._several(rows) or any(row.draft.parents for row in rows):
            return Launched(rows)
        with torch.cuda.stream(self._stream):
            return self._begin(rows)

    def collect(self, launched: Launched) -> list[Scored]:
        """Own tokens of each row, see `cascade.scorer.Scorer`. One host read; more if the adapters do not fit into one pass."""
        rows = launched.rows
        if launched.found is None and self._several(rows):
            first = {"", *[*dict.fromkeys(row.params.adapter for row in rows if row.params.adapter)][: self._most]}
            fitting = iter(self.run([row for row in rows if row.params.adapter in first]))
            others = iter(self.run([row for row in rows if row.params.adapter not in first]))
            return [next(fitting if row.params.adapter in first else others) for row in rows]
        with torch.cuda.stream(self._stream):  # nothing on a CPU
            if any(row.draft.parents for row in rows):
                found = run_trees(rows, lambda lines, seen: self._end(self._begin(lines), seen), shares_pass=False)
            else:
                found = self._end(launched if launched.found is not None else self._begin(rows), report)
            return self._guess(rows, found) if self.drafter else found

    def _several(self, rows: Sequence[Row]) -> bool:
        """Whether the adapters of these rows do not fit into one pass."""
        return self._folder is not None and len({row.params.adapter for row in rows} - {""}) > self._most

    def _begin(self, rows: Sequence[Row]) -> Launched:
        """Begin a pass; where no row has a state, which `settle` of a tier may still read, own tokens are chosen, too."""
        if self._folder is not None:
            self._need(rows)
        return Launched(rows, self._run(rows, choose=all(row.state is None for row in rows)))

    def _end(self, launched: Launched, on_scored: Report) -> list[Scored]:
        """Wait for a pass."""
        rows, found = launched.rows, launched.found
        if isinstance(found, Tensor):
            return scored(found, rows, on_scored)
        packed: list[list[int]] = found.read() if isinstance(found, Coming) else found
        return list(unpacked(packed, rows, [row.num_scored for row in rows]))

    def _guess(self, rows: Sequence[Row], found: list[Scored]) -> list[Scored]:
        """Let the head read what a pass has read, and guess after rows that ask for it."""
        if not (reads := readers(rows, found)):
            return found
        with self._busy:
            [said] = self._engine.collective_rpc("cascade_propose", args=(reading([*reads.values()]),))
        return with_drafts(found, reads, said)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Logits ``[sum of num_scored, vocab_size]`` of the rows' last positions."""
        found: Tensor = self._run(rows, choose=False)
        return found

    def _run(self, rows: Sequence[Row], *, choose: bool) -> Any:
        """Logits, or own tokens if the workers are to ``choose``, see `cascade.engine.vllm.worker.CascadeWorker`."""
        packed = Packed.of(rows)
        for row in rows:
            row.cache.prepare(row.start, row.start + len(row.input_ids))
        numbers = {"": 0, **self._numbers}
        if self._draft:
            numbers = defaultdict(int, numbers)
        batch = Batch(
            tokens=packed.tokens,
            starts=[row.start for row in rows],
            lengths=[len(row.input_ids) for row in rows],
            tables=[row.cache.table[: -(-(row.start + len(row.input_ids)) // self._blocks.block)] for row in rows],
            keep=packed.keep,
            adapters=[numbers[row.params.adapter] for row in rows] if self._most else [],
            asked=asked(rows) if choose else None,
            runner_ups=max((row.runner_ups for row in rows), default=0),
        )
        with self._busy:
            if self._blocks.copies:  # once, even if the pass is tried again: it may write into their sources
                self._engine.collective_rpc("cascade_copy", args=(self._blocks.copies,))
                self._blocks.copies.clear()
            found = self._engine.collective_rpc("cascade_score", args=(batch,))
        return next(one for one in found if one is not None)

    def close(self) -> None:
        """End the other ranks; give memory back, once all models of this process are closed."""
        if self.healthy:
            self.healthy = False
            _shut_down(self._engine)


def _shut_down(engine: Any) -> None:
    """Shut an engine down, its groups of ranks only once no engine runs: vLLM shares these within a process."""
    _running.remove(engine)
    _closed.append(engine)
    core = engine.engine_core.engine_core  # in this process
    if core.vllm_config.parallel_config.world_size > 1:
        core.model_executor.shutdown()  # its ranks are processes, and end at once
    if not _running:
        for each in _closed:
            each.engine_core.shutdown()
        _closed.clear()


def _start(
    source: str, cache_tokens: int | None, options: dict[str, Any], num_adapters: int, layers: Sequence[int] = ()
) -> Any:
    """vLLM's engine, of which only the workers are used."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with undisturbed():
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        if current_platform.is_cpu() and not options.keys() & {"kv_cache_memory_bytes", "gpu_memory_utilization"}:
            options["kv_cache_memory_bytes"] = int(host_memory() * HOST_SHARE)
        share = options.get("gpu_memory_utilization", 1.0)
        if current_platform.is_cuda() and share < UTILIZATION and "kv_cache_memory_bytes" not in options:
            dtype = options["dtype"] if options.get("dtype") in DTYPES else None  # "auto" is the checkpoint's
            known: dict[str, Any] = {"dtype": dtype, "quantization": options.get("quantization"), "layers": layers}
            weights = anatomy(source, sizes_only=True, **known).weight_bytes
            each = weights // options.get("tensor_parallel_size", 1)
            options["kv_cache_memory_bytes"] = cache_bytes(current_platform.get_device_total_memory(), share, each)
        if cache_tokens is not None:
            block = options.get("block_size") or (128 if current_platform.is_cpu() else 16)
            options["num_gpu_blocks_override"] = math.ceil(cache_tokens / block) + RESERVED
        if num_adapters:
            # on a CPU, rows without an adapter get the last one: it is empty, and adds nothing
            options |= {"enable_lora": True, "max_loras": num_adapters + current_platform.is_cpu()}
        if layers:
            options |= {"load_format": LAYERS, "model_loader_extra_config": {LAYERS: [*layers]}}
            options |= {"hf_overrides": partial(with_layers, layers=tuple(layers)), "worker_extension_cls": LOADING_LAYERS}
        try:
            return LLMEngine.from_engine_args(EngineArgs(model=source, **{**CHOSEN, **options}))
        except torch.OutOfMemoryError as error:
            advice = "lower max_model_len, set quantization, or take a larger device"
            raise ModelError(f"vLLM has no memory for {source!r}: {advice}") from error
        except Exception as error:  # a library may raise anything
            raise ModelError(f"vLLM cannot serve {source!r}: {reason(error)}") from error


def cache_bytes(total: int, share: float, weights: int) -> int:
    """Bytes for keys and values of a model that may hold a ``share`` of a GPU's ``total`` bytes, ``weights`` included.

    By arithmetic: vLLM measures a GPU while its other models start, and takes their memory for its own. Raises `ModelError`.
    """
    left = int(share * total) - weights - BESIDE
    if left < LEAST_CACHE:
        raise ModelError(
            f"A share of {share:.2f} of a GPU of {total / GIB:.1f} GiB is {share * total / GIB:.1f} GiB: weights of "
            f"{weights / GIB:.1f} GiB and {BESIDE / GIB:.0f} GiB for passes leave no room for keys and values: raise "
            "num_gpus or gpu_memory_utilization, or set quantization"
        )
    return left


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Undo what vLLM 0.32 does to a process on a CPU.

    Its worker replaces `torch.set_num_threads`, and looks for kernels in all modules by ``vars(value).get``, which llvmlite's
    lazy library answers with a function.
    """
    set_num_threads, ffi = torch.set_num_threads, sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if ffi is not None:
            sys.modules["llvmlite.binding.ffi"] = ffi
