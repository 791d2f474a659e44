"""Code that runs inside a vLLM worker: one forward pass over rows of any sessions from any positions.

vLLM adds `CascadeWorker` to the class of every worker (``worker_extension_cls``), and `collective_rpc` calls its methods on
all ranks. vLLM's scheduler and sampler are not used. Tried with vLLM 0.32 on CPUs, and 0.26 on an H100.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from cascade.engine.devices import sent
from cascade.engine.sampling.own_tokens import Choice, own_tokens_and_next, prepare
from cascade.engine.vllm.heads import Reading, propose
from cascade.errors import reason
from cascade.scorer import BLOCK

# vLLM's forward context and the buffers of its CPU kernels are globals of the process: tiers that share a
# process launch their passes one after the other. On a GPU the passes still overlap.
_PASSING = threading.Lock()
LAYERS = "cascade_layers"  # vLLM's name of `cascade.engine.vllm.loader.LayersLoader`, and of the layers in its options
PADDING_SLOT = -1  # keys and values of padding are not stored


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a pass as plain lists and arrays, which are sent to every rank."""

    tokens: list[int]  # all rows' tokens, one row after the other
    starts: list[int]  # the position of each row's first token
    lengths: list[int]  # each row's number of tokens
    tables: list[Sequence[int]]  # each row's blocks
    keep: list[int]  # places in ``tokens`` whose logits are needed
    adapters: list[int]  # each row's LoRA adapter, 0 for none; empty if the model has no adapters
    choices: list[Choice] | None = None  # how own tokens are chosen, see `own_tokens`; None to return logits
    runner_ups: int = 0  # for each own token


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a worker reports after loading its model and its cache."""

    device: torch.device
    dtype: torch.dtype
    num_blocks: int
    block: int  # positions of a block
    num_parameters: int
    backend: str  # the backend of attention
    problem: str | None  # why the model cannot be a tier


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that a worker raised; vLLM takes an exception that a worker returns for a raised one."""

    error: Exception


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Own tokens of a pass that are being copied from a GPU to the host."""

    values: Tensor  # int64 on the host, valid after ``done``
    done: torch.cuda.Event

    @classmethod
    def begin(cls, values: Tensor) -> Self:
        """Start to copy ``values`` without waiting."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(host, done)

    def read(self) -> list[list[int]]:
        """Wait for the tokens and return them."""
        self.done.synchronize()
        values: list[list[int]] = self.values.tolist()
        return values


class CascadeWorker:
    """Methods that every vLLM worker gets."""

    model_runner: Any  # vLLM's ``GPUModelRunner``, or its subclass for CPUs
    vllm_config: Any
    _excluded: Tensor | None = None  # bool ``[vocab_size]``: the tokens that the model never predicts
    _read: tuple[Tensor, dict[int, int]]  # hidden states of the last pass, and their places by slot
    _scratch: Any  # vLLM's ``WorkspaceManager`` of this model

    def cascade_call(self, method: str, *args: Any, **options: Any) -> Any:
        """What a method of this worker says; what it raises, as a value.

        vLLM raises what the first rank raises, and takes what others have said to it for their answers to the next call.
        """
        try:
            return getattr(self, method)(*args, **options)
        except Exception as error:
            alone = self.vllm_config.parallel_config.world_size == 1
            return Failure(error if alone else RuntimeError(reason(error)))  # not all can travel

    def cascade_facts(self) -> Facts:
        """Facts that a tier needs before its first pass, for which everything is compiled afterwards."""
        from vllm.v1.worker import workspace

        runner, self._scratch = self.model_runner, workspace._manager
        prepare(runner.device, runner.dtype, self.vllm_config.model_config.get_vocab_size())
        groups = runner.kv_cache_config.kv_cache_groups
        return Facts(
            device=runner.device,
            dtype=runner.dtype,
            num_blocks=runner.kv_cache_config.num_blocks,
            block=groups[0].kv_cache_spec.block_size if groups else 0,
            num_parameters=sum(weight.numel() for weight in runner.model.parameters()),
            backend=runner.attn_groups[0][0].backend.get_name() if groups else "",
            problem=_problem(runner),
        )

    def cascade_restrict(self, ids: list[int]) -> None:
        """Let the model predict only ``ids``, its draft vocabulary."""
        excluded = torch.ones(self.vllm_config.model_config.get_vocab_size(), dtype=torch.bool)
        excluded[ids] = False
        self._excluded = excluded.to(self.model_runner.device)

    @torch.inference_mode()
    def cascade_copy(self, sources: dict[int, int]) -> None:
        """Give blocks the keys and values of their sources, all at once in each layer."""
        runner = self.model_runner
        to, of = sent([[*sources], [*sources.values()]], runner.device)
        for cache in {cache.data_ptr(): cache for cache in runner.kv_caches}.values():
            blocks = cache.unflatten(0, (runner.kv_cache_config.num_blocks, -1))  # a kernel may split a block into several
            blocks[to] = blocks[of]

    @torch.inference_mode()
    def cascade_score(self, batch: Batch) -> Tensor | HostCopy | list[list[int]] | None:
        """One forward: logits ``[len(keep), vocab_size]``, or the result of `own_tokens_and_next`; None on other ranks.

        With one rank this does not wait for a GPU.
        """
        ranks = self.vllm_config.parallel_config
        with self._alone():
            logits = self._forward(batch)
            if logits is None or ranks.rank:
                return None
            if batch.choices is None:
                return logits if ranks.world_size == 1 else logits.cpu()
            own = own_tokens_and_next(logits, batch.choices, batch.runner_ups)
            return HostCopy.begin(own) if ranks.world_size == 1 and own.is_cuda else own.tolist()

    @torch.inference_mode()
    def cascade_propose(self, reading: Reading) -> list[list[list[int]]]:
        """Let the head read texts of the last pass and guess after them, see `cascade.engine.vllm.heads.propose`."""
        runner, (hidden, places_of) = self.model_runner, self._read
        block = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        positions, slots = _places(reading, block)
        read_at = [places_of[slot] for slot in slots]
        places, slot_mapping, read = sent([*positions, *slots, *read_at], runner.device).split(len(slots))
        with self._alone():
            guesses = propose(runner.drafter, reading, hidden[read], self._common(reading, slot_mapping, places))
        results: list[list[list[int]]] = guesses.tolist()
        return results

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Launch a pass while no other model of the process does, with scratch memory that is this model's alone.

        vLLM keeps the latest model's in a global. Graphs of earlier ones were captured over theirs, and they may run at once.
        """
        from vllm.v1.worker import workspace

        with _PASSING:
            workspace._manager = self._scratch
            yield

    def _forward(self, batch: Batch) -> Tensor | None:
        from vllm.forward_context import set_forward_context

        runner, n = self.model_runner, len(batch.tokens)
        mode, descriptor = self._graph(batch)
        padded = max(n, descriptor.num_tokens) if descriptor is not None else n
        positions, slots = _places(batch, runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        fill = [0] * (padded - n)
        # one copy to the device for all four tensors
        whole = [*batch.tokens, *fill, *positions, *fill, *slots, *[PADDING_SLOT] * len(fill), *batch.keep]
        ids, places, slot_mapping, keep = sent(whole, runner.device).split([padded, padded, padded, len(batch.keep)])
        ids = ids.to(torch.int32)
        if fill or mode.value:  # graphs read the buffers of their capture
            runner.input_ids.gpu[:padded].copy_(ids)
            runner.positions[:padded].copy_(places)
            ids, places = runner.input_ids.gpu[:padded], runner.positions[:padded]
        if batch.adapters:
            of_tokens = [adapter for adapter, length in zip(batch.adapters, batch.lengths, strict=True) for _ in range(length)]
            runner._set_active_loras(tuple(of_tokens[place] for place in batch.keep), tuple(of_tokens), set())
        metadata, mapping = self._metadata(batch, slot_mapping, places, descriptor if mode.name == "FULL" else None)
        options = {"num_tokens": padded, "cudagraph_runtime_mode": mode, "batch_descriptor": descriptor}
        with set_forward_context(metadata, self.vllm_config, slot_mapping=mapping, **options):
            output = runner.model(input_ids=ids, positions=places)
        hidden, several = output if isinstance(output, tuple) else (output, ())
        if runner.speculative_config is not None:
            self._read = (torch.cat(several, -1) if several else hidden)[:n], {slot: place for place, slot in enumerate(slots)}
        logits: Tensor | None = runner.model.compute_logits(hidden[keep])
        if logits is not None and self._excluded is not None:
            logits.masked_fill_(self._excluded, torch.finfo(logits.dtype).min)
        return logits

    def _graph(self, batch: Batch) -> tuple[Any, Any]:
        """Mode and descriptor of the captured graph that the pass replays."""
        from vllm.config import CUDAGraphMode

        runner = self.model_runner
        if runner.device.type != "cuda":
            return CUDAGraphMode.NONE, None
        return dispatched(runner.cudagraph_dispatcher, len(batch.tokens), len(batch.starts), len({*batch.adapters} - {0}))

    def _metadata(self, batch: Batch, slots: Tensor, positions: Tensor, whole: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Metadata of the rows for each layer's attention backend, and the slots of tokens.

        ``slots`` and ``positions`` are those of all tokens, padding included. ``whole`` is the descriptor of a
        graph of the whole pass, see `_held`; None if it replays none.
        """
        if whole is None:
            common = self._common(batch, slots, positions[: len(batch.tokens)])
        else:
            from vllm.v1.attention.backend import CommonAttentionMetadata

            buffers = _held(self.model_runner, batch, slots, whole.num_reqs)
            common, slots = CommonAttentionMetadata(**buffers, causal=True, positions=positions), buffers["slot_mapping"]
        metadata: dict[str, Any] = {}
        for group in (group for groups in self.model_runner.attn_groups for group in groups):
            if hasattr(group, "build_metadata"):  # with block tables as its kernel sees them
                built = group.build_metadata(common)
            else:  # vLLM 0.26
                built = group.get_metadata_builder(0).build(common_prefix_len=0, common_attn_metadata=common)
            metadata.update(dict.fromkeys(group.layer_names, built))
        return metadata, dict.fromkeys(metadata, slots)

    def _common(self, batch: Batch | Reading, slots: Tensor, positions: Tensor) -> Any:
        """Metadata of the rows that all attention backends need."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        runner, rows = self.model_runner, len(batch.starts)
        ends = [start + length for start, length in zip(batch.starts, batch.lengths, strict=True)]
        bounds = [0, *accumulate(batch.lengths)]
        tables: Any = np.zeros((rows, max(map(len, batch.tables))), np.int32)
        for row, table in zip(tables, batch.tables, strict=True):
            row[: len(table)] = table
        return CommonAttentionMetadata(
            query_start_loc=sent(bounds, runner.device, torch.int32),
            query_start_loc_cpu=torch.tensor(bounds, dtype=torch.int32),
            seq_lens=sent(ends, runner.device, torch.int32),
            seq_lens_cpu_upper_bound=torch.tensor(ends, dtype=torch.int32),  # proposers count both up
            num_reqs=rows,
            num_actual_tokens=len(batch.tokens),
            max_query_len=max(batch.lengths),
            max_seq_len=max(ends),
            block_table_tensor=sent(tables, runner.device, torch.int32),
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=torch.zeros(rows, dtype=torch.bool),
        )


def dispatched(dispatcher: Any, num_tokens: int, num_rows: int, num_adapters: int) -> tuple[Any, Any]:
    """Mode and descriptor of the captured graph for a pass, by vLLM's ``CudagraphDispatcher``; ``NONE`` if there is none.

    With vLLM's ``cudagraph_mode`` ``FULL`` a pass is one graph, which reads block tables, lengths and row bounds where they
    were at capture. With other modes passes replay pieces between attention layers; only these have run on a GPU.
    """
    from vllm.config import CUDAGraphMode

    most = dispatcher.vllm_config.scheduler_config.max_num_seqs
    whole = dispatcher.cudagraph_mode == CUDAGraphMode.FULL and num_rows <= most
    adapted = {"has_lora": num_adapters > 0, "num_active_loras": num_adapters}
    graph: tuple[Any, Any] = dispatcher.dispatch(num_tokens, invalid_modes=None if whole else {CUDAGraphMode.FULL}, **adapted)
    return graph


def _held(runner: Any, batch: Batch, slots: Tensor, num_rows: int) -> dict[str, Any]:
    """Write the attention metadata of a pass into the buffers of vLLM's runner; returns it for `CommonAttentionMetadata`.

    ``slots`` int64 are those of all tokens, padding included. Rows up to ``num_rows`` are empty. The buffers are
    pinned: they may be written again once the pass has ended.
    """
    table, bounds, number = runner.input_batch.block_table[0], runner.query_start_loc, len(batch.starts)
    for place, blocks in enumerate(batch.tables):
        table.add_row(blocks, place)
    for place in range(number, num_rows):
        table.clear_row(place)
    table.commit_block_table(num_rows)
    table.slot_mapping.gpu[: len(slots)].copy_(slots)
    bounds.np[: number + 1] = [0, *accumulate(batch.lengths)]
    bounds.np[number + 1 : num_rows + 1] = bounds.np[number]
    bounds.copy_to_gpu(num_rows + 1)
    ends = [start + length for start, length in zip(batch.starts, batch.lengths, strict=True)]
    ends += [0] * (len(runner.seq_lens) - number)
    pinned = torch.tensor(ends, dtype=torch.int32, pin_memory=runner.device.type == "cuda")
    runner.seq_lens.copy_(pinned, non_blocking=True)
    return {
        "query_start_loc": bounds.gpu[: num_rows + 1],
        "query_start_loc_cpu": bounds.cpu[: num_rows + 1],
        "seq_lens": runner.seq_lens[:num_rows],
        "seq_lens_cpu_upper_bound": pinned[:num_rows],
        "num_reqs": num_rows,
        "num_actual_tokens": len(slots),
        "max_query_len": len(slots),  # the value at capture
        "max_seq_len": max(ends),
        "block_table_tensor": table.get_device_tensor(num_rows),
        "slot_mapping": table.slot_mapping.gpu[: len(slots)],
        "is_prefilling": torch.zeros(num_rows, dtype=torch.bool),
    }


def _problem(runner: Any) -> str | None:
    """A message why a model cannot be a tier, or None: rolled back text must vanish once it is overwritten."""
    groups = runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"its layers keep {len(groups)} kinds of state, and only keys and values can be rolled back"
    spec = groups[0].kv_cache_spec
    if "Mamba" in type(spec).__name__:
        return "it keeps a state that cannot be rolled back"
    if getattr(runner, "uses_mrope", False):
        return "its positions have several axes"
    if spec.block_size % BLOCK:
        return f"its blocks have {spec.block_size} positions, which is no multiple of {BLOCK}"
    return None


def _places(batch: Batch | Reading, block: int) -> tuple[list[int], list[int]]:
    """Positions of all tokens, and the slots of their keys and values: ``block id * block + place in it``."""
    positions, slots = [], []
    for start, length, table in zip(batch.starts, batch.lengths, batch.tables, strict=True):
        for position in range(start, start + length):
            positions.append(position)
            slots.append(table[position // block] * block + position % block)
    return positions, slots
