"""The other ranks of a replica whose model is shared: actors in the replica's own placement group."""

import os
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cascade.engine.parallel import LeadingModel, check_ranks, follow, rendezvous
from cascade.errors import ModelError
from cascade.settings.config import TierConfig
from cascade.settings.engine import EngineKwargs


class Ranks:
    """Starts the other ranks, leads them, and knows whether they are all there. Ends with the replica, which owns them."""

    def __init__(self, config: TierConfig) -> None:
        """Start the actors; raises `ModelError` if the model cannot be shared among so many."""
        engine = config.engine_kwargs
        self._size = engine.tensor_parallel_size
        self._source = config.model_loading_config.source
        self._adapters = engine.lora_modules
        self._options = _options(engine)
        self._memory = {"cache_tokens": engine.cache_tokens, "gpu_memory_utilization": config.gpu_memory_utilization}
        check_ranks(self._source, self._size, adapters=self._adapters, **self._options)
        self._store, address = rendezvous(ray.util.get_node_ip_address(), self._size)
        self._actors = [_actor(rank) for rank in range(1, self._size)]
        self.pids: list[int] = ray.get([actor.pid.remote() for actor in self._actors])
        self._ends = [
            actor.follow.remote(address, rank, self._size, self._source, engine.model_dump(mode="json"), self._options)
            for rank, actor in enumerate(self._actors, start=1)
        ]

    def lead(self) -> LeadingModel:
        """Load this replica's share; returns when all ranks have loaded."""
        options = {"adapters": self._adapters, "memory": self._memory, **self._options}
        return LeadingModel.lead(self._store, self._size, self._source, **options)

    def check(self) -> None:
        """Raise `ModelError` if one of the other ranks is over."""
        over, _ = ray.wait(self._ends, num_returns=1, timeout=0)
        for end in over:
            try:
                ray.get(end)
            except Exception as error:  # of the rank's own code, or its death
                raise ModelError(f"A rank of the model was lost: {str(error).strip().splitlines()[-1]}") from error
            raise ModelError("A rank of the model has gone home")


class Rank:
    """One of the other ranks."""

    def pid(self) -> int:
        return os.getpid()

    def follow(self, address: str, rank: int, ranks: int, source: str, engine: dict[str, Any], options: dict[str, Any]) -> None:
        """Take part until the leader closes; ``engine`` is the tier's."""
        known = EngineKwargs.model_validate(engine)
        bind_threads(known)
        follow(address, rank, ranks, source, adapters=known.lora_modules, **options)


def bind_threads(engine: EngineKwargs) -> None:
    """Bind all threads of this process to the configured cores, and limit those of a pass."""
    if engine.cpu_affinity is not None:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), engine.cpu_affinity)
    given = os.environ.get("OMP_NUM_THREADS", "")  # Ray sets it for a worker; in a fork PyTorch has looked before
    threads = engine.num_threads or (int(given) if given.isdigit() else None)
    if threads:
        torch.set_num_threads(threads)


def _actor(rank: int) -> Any:
    """An actor that takes bundle ``rank`` of the replica's placement group."""
    group = ray.util.get_current_placement_group()
    if group is None or len(group.bundle_specs) <= rank:
        raise ModelError("The replica has no placement group with a bundle for each rank: give placement_group_config one")
    resources = dict(group.bundle_specs[rank])
    strategy = PlacementGroupSchedulingStrategy(group, rank)
    return (
        ray.remote(Rank)
        .options(num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), scheduling_strategy=strategy)
        .remote()
    )


def _options(engine: EngineKwargs) -> dict[str, Any]:
    return {
        "dtype": engine.dtype,
        "device": engine.device,
        "revision": engine.revision,
        "trust_remote_code": engine.trust_remote_code,
        "quantization": engine.quantization,
    }
