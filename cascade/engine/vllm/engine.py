"""Starts and stops vLLM's engine, of which a tier uses only the workers; its arguments and its memory."""

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from cascade.drafters import DrafterSpec
from cascade.engine.checkpoint import DTYPES, anatomy
from cascade.engine.devices import HOST_SHARE, UTILIZATION
from cascade.engine.memory import GIB, host_memory
from cascade.engine.model_config import read_config
from cascade.engine.vllm import installed, with_layers
from cascade.engine.vllm.blocks import RESERVED
from cascade.engine.vllm.heads import head_weights, speculative_config
from cascade.engine.vllm.worker import LAYERS
from cascade.errors import ConfigError, ModelError, model_errors
from cascade.params import MAX_BRANCHES

_running: list[Any] = []  # engines of this process
_closed: list[Any] = []  # engines that wait until all are closed, see `shut_down`
CHOSEN = {  # engine arguments set by a tier
    "skip_tokenizer_init": True,
    "worker_extension_cls": "cascade.engine.vllm.worker.CascadeWorker",
    "enable_prefix_caching": False,
    "disable_hybrid_kv_cache_manager": True,
    "language_model_only": True,
    "disable_log_stats": True,
}
LOADING_LAYERS = "cascade.engine.vllm.loader.CascadeWorker"  # the same worker, for a model of some layers
BESIDE = 2 * GIB  # memory that each of several models on a GPU needs for its context, passes and graphs
LEAST_CACHE = GIB // 4  # the least useful memory for keys and values
ROOM_TOKENS = 2048  # vLLM's limit of tokens per pass, at least
GRAPH_TOKENS = 512  # a longer pass computes for longer than its launch takes
CAPTURED = {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}  # arguments that say which graphs there are
OURS = {*CHOSEN, "model", "tokenizer", "enable_lora", "max_loras"}
OURS |= {"speculative_config", "pipeline_parallel_size", "data_parallel_size"}  # the cascade drafts; a tier has neither
OURS |= {"decode_context_parallel_size", "prefill_context_parallel_size"}  # slots would lie on other ranks
# environment variables: vLLM's engine runs in this process, and its workers do not bind threads
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

    names = {field.name for field in fields(EngineArgs)}
    for name in options:
        if name in OURS:
            raise ConfigError(f"{name} is an engine argument of vLLM that a tier has no use for: remove it from engine_kwargs")
        if name not in names:
            raise ConfigError(f"{name} is no engine argument of this vLLM: see vllm.EngineArgs for their names")


def check_architectures(names: Sequence[str]) -> None:
    """Raise `ConfigError` if vLLM has no model for any of the architectures that a checkpoint names; needs vLLM."""
    from vllm import ModelRegistry

    if names and not {*names} & ModelRegistry.get_supported_archs():
        raise ConfigError(
            f"vLLM has no model for {names[0]}: set engine to 'cascade', or model_impl to 'transformers' for vLLM to try theirs"
        )


def start(
    source: str,
    options: Mapping[str, Any],
    *,
    cache_tokens: int | None,
    num_adapters: int,
    layers: Sequence[int],
    drafter: DrafterSpec | None,
) -> Any:
    """Start vLLM with ``options``; returns parts of a `cascade.engine.vllm.model.VllmModel`, or raises `ModelError`."""
    options = dict(options)
    if drafter is not None:
        options["speculative_config"] = speculative_config(drafter, source, layers)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with undisturbed():
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        type(current_platform)._global_graph_pool = None  # graphs of one pool must not run at once, and those of models do
        if current_platform.is_cpu() and not options.keys() & {"kv_cache_memory_bytes", "gpu_memory_utilization"}:
            options["kv_cache_memory_bytes"] = int(host_memory() * HOST_SHARE)
        share = options.get("gpu_memory_utilization", 1.0)
        if current_platform.is_cuda() and share < UTILIZATION and "kv_cache_memory_bytes" not in options:
            weights = weight_bytes(source, options, layers, drafter)
            options["kv_cache_memory_bytes"] = cache_bytes(current_platform.get_device_total_memory(), share, weights)
        if num_adapters:
            # on a CPU, rows without an adapter get the last one, which is empty
            options |= {"enable_lora": True, "max_loras": num_adapters + current_platform.is_cpu()}
        if layers:
            options |= {"load_format": LAYERS, "model_loader_extra_config": {LAYERS: [*layers]}}
            options |= {"hf_overrides": partial(with_layers, layers=tuple(layers)), "worker_extension_cls": LOADING_LAYERS}
        with model_errors(f"vLLM cannot serve {source!r}"):
            try:
                config = EngineArgs(model=source, **{**CHOSEN, **options}).create_engine_config()
                if cache_tokens is not None:
                    blocks = math.ceil(cache_tokens / config.cache_config.block_size)
                    config.cache_config.num_gpu_blocks_override = blocks + RESERVED
                engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
            except torch.OutOfMemoryError as error:
                advice = "lower max_model_len, set quantization, or take a larger device"
                raise ModelError(f"vLLM has no memory for {source!r}: {advice}") from error
    _running.append(engine)
    return engine


def shut_down(engine: Any) -> None:
    """Shut an engine down; its rank groups, which a process shares, are shut down when no engine is left."""
    _running.remove(engine)
    _closed.append(engine)
    core = engine.engine_core.engine_core  # in this process
    if core.vllm_config.parallel_config.world_size > 1:
        core.model_executor.shutdown()  # its ranks are processes, which end at once
    if not _running:
        for each in _closed:
            each.engine_core.shutdown()
        _closed.clear()


def pass_options(max_pass_tokens: int, max_sessions: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's engine arguments for passes of a tier; ``options`` take precedence.

    A row is a session's text with its guesses, or one of `MAX_BRANCHES` branches. A pass with more rows, or
    more tokens than `GRAPH_TOKENS`, replays no graph. Trees whose branches are scored as separate rows may make a pass
    longer than ``max_pass_tokens``, so vLLM's limit is at least `ROOM_TOKENS`.
    """
    tokens = options.get("max_num_batched_tokens", max(ROOM_TOKENS, max_pass_tokens))
    made: dict[str, Any] = {"max_num_batched_tokens": tokens, "max_num_seqs": min(max_sessions + MAX_BRANCHES, tokens)}
    compiled = options.get("compilation_config")
    if not CAPTURED & (options.keys() | (compiled.keys() if isinstance(compiled, Mapping) else ())):
        most = min(max_pass_tokens, GRAPH_TOKENS, tokens)
        steps = (size for power in range(most.bit_length()) for size in (1 << power, 3 << power >> 1))
        made["cudagraph_capture_sizes"] = sorted({size for size in steps if size < most} | {most})
    return made


def weight_bytes(source: str, options: Mapping[str, Any], layers: Sequence[int], drafter: DrafterSpec | None) -> int:
    """Bytes of weights on each rank, including a head's, by the headers of the files. Raises `ModelError`."""
    dtype = options["dtype"] if options.get("dtype") in DTYPES else None  # "auto" is the checkpoint's
    sizes = anatomy(source, sizes_only=True, dtype=dtype, quantization=options.get("quantization"), layers=layers)
    head = 0
    if drafter is not None:
        head = head_weights(drafter, source, read_config(source).get_text_config().num_hidden_layers) or 0
    return sizes.weight_bytes // options.get("tensor_parallel_size", 1) + head * sizes.dtype.itemsize


def cache_bytes(total: int, share: float, weights: int) -> int:
    """Bytes for keys and values of a model that may hold a ``share`` of a GPU's ``total`` bytes, ``weights`` included.

    Computed, since vLLM measures the GPU while other models start on it, and counts their memory as its own. Raises
    `ModelError`.
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
    """Undo changes that vLLM 0.32 makes to a process on a CPU.

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
