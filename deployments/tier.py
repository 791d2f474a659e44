"""The deployment of one tier: loads the model for a `cascade.tier.tier.Tier`, and connects it to links."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import ray.util
import torch
from ray.serve.handle import DeploymentHandle

from cascade.drafters import head_of, make
from cascade.engine.adapter_folder import AdapterFolder
from cascade.engine.grammar import Grammars
from cascade.engine.sampling.state import state_maker
from cascade.engine.threads import apart
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import ConfigError, ModelError
from cascade.params import SamplingParams
from cascade.planner.chains import Planner
from cascade.planner.cost import Profile
from cascade.settings.config import CascadeConfig, TierConfig
from cascade.settings.engine import EngineKwargs
from cascade.tier.runner import measure
from cascade.tier.tier import Tier
from deployments.links.downlink import Downlink
from deployments.links.leases import LeasePool, lessor
from deployments.links.tls import check
from deployments.links.uplink import LinkServer
from deployments.ops.learner import Weights
from deployments.ops.metrics import Reading, report
from deployments.ops.tracing import flush, tracing
from deployments.replica import check_alike, replica_name, starting

T = TypeVar("T")
log = logging.getLogger(__name__)

LEASE_TIMEOUT_S = 2.0  # time to get a drafter; after that the session continues without it


class TierReplica:
    """One replica of the tier ``name`` of a cascade. ``lower`` are handles of the tiers below, by name.

    ``shared`` names tiers below that compute on the processors of this one if they run on its machine; ``packages`` are the
    versions that all nodes must have.
    """

    _started = False

    @starting()
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: Mapping[str, Any],
        name: str,
        lower: Mapping[str, DeploymentHandle],
        shared: Sequence[str],
        packages: Mapping[str, str],
    ) -> None:
        check_alike(packages)
        cascade = CascadeConfig.model_validate(config)
        self._config = cascade.tier(name)
        if (tls := cascade.link_tls) is not None:
            check(tls)
        engine = self._config.engine_kwargs
        bind_threads(engine)
        folder = None if engine.lora_path is None else await asyncio.to_thread(AdapterFolder, engine.lora_path)
        self._model = await _apart(partial(load_model, self._config, folder, draft=self._config is not cascade.tiers[-1]))
        log.info("Tier %s: %s", self._config.name, self._model.summary)
        self._weights = ""  # version of learned weights
        stated: Profile | None = getattr(self._model, "profile", None)  # an engine may give the cost of passes itself
        measuring = partial(measure, self._model, max_tokens=engine.max_pass_tokens)
        self._profile = await _apart(measuring) if stated is None else stated
        tokenizer = await asyncio.to_thread(_load_tokenizer, self._config)
        encode = None if tokenizer is None else tokenizer.encode_part
        grammars = None if tokenizer is None else Grammars(tokenizer)
        if grammars is not None:
            await asyncio.to_thread(grammars.prepare)
        new_state = state_maker(None if grammars is None else grammars.matcher)
        self._tier = Tier(
            name,
            cascade.chain_names.index(name),
            self._model,
            planner=Planner(shared),
            max_pass_tokens=engine.max_pass_tokens,
            profile=self._profile,
            new_state=new_state if getattr(self._model, "shapes", True) else None,
            drafters=make(engine.drafters, cascade.drafters, encode),
        )
        model = self._config.model_loading_config.model_id
        traced = tracing(name, model)
        lessors = {below: lessor(handle) for below, handle in lower.items()}
        leases = LeasePool(lessors, timeout_s=LEASE_TIMEOUT_S)
        host = ray.util.get_node_ip_address()
        self._downlink = Downlink(leases, self._tier.post, tls=tls, tracing=traced, host=host, locate=self._tier.planner.locate)
        self._tier.below = self._downlink if lower else None
        ports = None if cascade.link_ports is None else (cascade.link_ports[0], cascade.link_ports[1])
        self._server = LinkServer(self._tier, tls, traced, ports, partial(prepare, grammars, folder))
        self._replica = replica_name()
        self._tier.start()
        await self._server.start(host)
        source = partial(replica_readings, self._tier, self._profile, self._server, self._downlink)
        self._reporting = asyncio.create_task(report(model, name, source))
        self._started = True

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Metadata for `PreferringRouter`; called by Serve."""
        return {"address": self._server.address}

    async def lease(self, name: str, preferred: Sequence[str] = (), affinity: str = "") -> AsyncIterator[str]:
        """Hold this replica: yields the address and secret for its link, then nothing until the lease of that name ends.

        ``preferred`` and ``affinity`` are not used here; Serve's router has chosen this replica by them.
        """
        async for address in self._server.lease(name):
            yield address

    async def describe(self) -> dict[str, Any]:
        """Describe this replica, for `Describe`."""
        blocks = self._tier.kv_admission.block_manager
        return {
            "name": self._config.name,
            "model": self._config.model_loading_config.model_id,
            "context_len": self._model.context_len,
            "cache_tokens": self._tier.kv_admission.num_tokens,
            "vocab_size": self._model.vocab_size,
            "parameters": self._model.num_parameters,
            "device": str(self._model.device),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "same_bits": self._model.same_bits,
            "engine": self._config.engine_kwargs.runs_on(gpu=torch.cuda.is_available()),
            "pid": os.getpid(),
            "sessions": self._tier.num_sessions,
            "leases": len(self._server.leases),
            "drafting": self._downlink.num_sessions,
            "queried": blocks.queried,
            "reused": blocks.reused,
            "pass_cost": [{"tokens": tokens, "seconds": seconds} for tokens, seconds in self._profile.points],
            "context_s": self._profile.context_s,
            "worth": [worth._asdict() for worth in self._tier.planner.worths()],
        }

    async def weights(self) -> Weights:
        """This replica's weights and verdicts on them, for the learner."""
        return Weights(self._replica, self._weights, *self._tier.verdicts)

    async def renew(self, replica: str, version: str, source: str) -> bool:
        """Load other weights, for the learner, if this is the replica of that name; returns whether it is."""
        if replica == self._replica:
            await _apart(partial(self._model.renew, source))
            self._weights = version
            log.info("Tier %s continues with weights %s", self._config.name, version or "that it began with")
        return replica == self._replica

    def check_health(self) -> None:
        """Called by Serve, which replaces this replica if it raises."""
        if not self._tier.healthy or not self._model.healthy:
            raise RuntimeError(f"the loop of tier {self._config.name} has stopped, or its passes fail or do not end")

    async def __del__(self) -> None:
        if not self._started:
            return
        await self._server.stop()
        await self._downlink.close()
        await asyncio.to_thread(flush)
        await asyncio.to_thread(self._tier.close)
        if not self._tier.hangs:  # closing a model on a device that hangs would not return
            await asyncio.to_thread(self._model.close)
        self._reporting.cancel()


def prepare(grammars: Grammars | None, folder: AdapterFolder | None, params: SamplingParams) -> None:
    """Compile the grammar and fetch the adapter of a session; raises `InvalidRequest`."""
    if grammars is not None and params.structured is not None:
        grammars.matcher(params.structured)
    if folder is not None and params.adapter:
        folder.place(params.adapter)


async def _apart(work: Callable[[], T]) -> T:
    """`cascade.engine.threads.apart`, outside of the event loop."""
    return await asyncio.to_thread(apart, work)


def bind_threads(engine: EngineKwargs) -> None:
    """Bind all threads of this process to the configured cores, and limit those of a pass; raises `ConfigError`."""
    if engine.cpu_affinity is not None:
        there = os.sched_getaffinity(0)
        if missing := sorted({*engine.cpu_affinity} - there):
            raise ConfigError(f"cpu_affinity names core {missing[0]}, and this process has {sorted(there)}: name some of these")
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                os.sched_setaffinity(int(thread.name), engine.cpu_affinity)
    given = os.environ.get("OMP_NUM_THREADS", "")  # Ray sets this for workers
    threads = engine.num_threads or (int(given) if given.isdigit() else None)
    if threads:
        torch.set_num_threads(threads)


def load_model(config: TierConfig, folder: AdapterFolder | None = None, *, draft: bool = False) -> Any:
    """The model of a tier, a `cascade.scorer.Scorer`, on the engine of its configuration; raises `ModelError`.

    ``folder`` has adapters that are loaded on demand. A ``draft`` model predicts only its draft vocabulary. Engines are
    imported only if chosen, since each import takes seconds.
    """
    engine = config.engine_kwargs
    if engine.engine is not None and engine.plugin:
        module, _, name = engine.engine.partition(":")
        try:
            return getattr(import_module(module), name)(config)
        except (ImportError, AttributeError) as error:
            raise ModelError(f"engine is {engine.engine!r}, which cannot be imported: {error}") from error
    source, chosen = config.model_loading_config.source, dict[str, Any](draft=draft, layers=engine.layers or ())
    if engine.runs_on(gpu=torch.cuda.is_available()) == "vllm":
        from cascade.engine.vllm.model import VllmModel

        share = {"gpu_memory_utilization": config.gpu_memory_utilization} if torch.cuda.is_available() else {}
        adapters: dict[str, Any] = {"adapters": engine.lora_modules, "folder": folder, "most": engine.max_loras}
        chosen |= {"drafter": head_of(engine.drafters), "options": share | engine.vllm_options}
        chosen |= {"max_pass_tokens": engine.max_pass_tokens, "max_sessions": config.deployment_config.max_ongoing_requests}
        return VllmModel(source, cache_tokens=engine.cache_tokens, **chosen, **adapters)
    from cascade.engine.checkpoint import load
    from cascade.engine.model import Model

    network = load(source, dtype=engine.dtype, device=engine.device, **engine.hub, **chosen)
    memory: dict[str, Any] = {"cache_tokens": engine.cache_tokens, "gpu_memory_utilization": config.gpu_memory_utilization}
    return Model(network, num_threads=engine.num_threads, **memory)


def _load_tokenizer(config: TierConfig) -> Tokenizer | None:
    """The tokenizer for grammars; ``None`` if the model has none."""
    try:
        return Tokenizer.from_pretrained(config.model_loading_config.source, **config.engine_kwargs.hub)
    except ModelError as error:
        log.warning("Tier %s takes no part in structured output: %s", config.name, error)
        return None


def replica_readings(tier: Tier, profile: Profile, server: LinkServer, downlink: Downlink) -> Iterator[Reading]:
    """All metrics of a replica: of its loop, its memory, the worth of its drafters, and its links."""
    blocks, stats = tier.kv_admission.block_manager, tier.stats
    yield Reading("healthy", (), float(tier.healthy))
    yield Reading("sessions", (), tier.num_sessions)
    yield Reading("leases", (), len(server.leases))
    yield Reading("tier_passes", (), stats.passes)
    yield Reading("tier_busy_seconds", (), stats.busy_s)
    yield Reading("tier_scored_tokens", (), stats.tokens)
    yield Reading("tier_own_tokens", (), stats.own_tokens)
    yield Reading("tier_pass_failures", (), stats.failures)
    yield Reading("kv_cache_usage_perc", (), blocks.usage)
    yield Reading("kv_cache_tokens", (), tier.kv_admission.num_tokens)
    yield Reading("prefix_cache_queries", (), blocks.queried)
    yield Reading("prefix_cache_hits", (), blocks.reused)
    yield Reading("num_preemptions", (), tier.kv_admission.preempted)
    for drafter, sampled, num_sessions, factor in tier.planner.worths():
        yield Reading("tier_worth", (drafter, "sampled" if sampled else "greedy", str(num_sessions)), factor)
    for tokens, seconds in profile.points:
        yield Reading("pass_seconds", (tier.name, str(tokens)), seconds)
    yield Reading("context_seconds", (tier.name,), profile.context_s)
    yield from downlink.readings()
