"""A whole server in this process, without Ray: toy tiers joined by real links, and a router with its own servers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from anyio.from_thread import start_blocking_portal

from cascade.engine.grammar import Grammars
from cascade.engine.tokenizer import Tokenizer
from cascade.settings.config import CascadeConfig
from cascade.settings.router import ListenConfig
from deployments.gateway.admission import admission
from deployments.gateway.grpc import api
from deployments.links import replica_status
from deployments.ops.launch import free_port
from deployments.ops.tracing import UNTRACED, Tracing
from deployments.router import Router
from tests import small
from tests.links.net import Net, Node
from tests.tier.test_tier import NAMES, CountingModel
from tests.waiting import LONG_S, until

T = TypeVar("T")
VOCAB = 4096  # of the small models's tokenizer
AGREEMENT = {"tiny": 0.6, "medium": 0.8, "full": 1.0}


def deployment(tier: str) -> str:
    """The name of a tier's deployment, as where several models are served: of the model and the tier."""
    return f"toy:{tier}"


class Handle:
    """A Serve handle of the tier ``name``; a tier without a replica never answers."""

    def __init__(self, net: Net, name: str) -> None:
        self._net, self._name = net, name
        self.deployment_name = deployment(name)
        self.num_calls = 0
        self.describe = SimpleNamespace(remote=self._describe)
        self.lease = SimpleNamespace(remote=self._lease)

    def options(self, **options: object) -> "Handle":
        return self

    def _describe(self) -> "asyncio.Task[dict[str, Any]]":
        self.num_calls += 1
        return asyncio.create_task(self._state())

    async def _state(self) -> dict[str, Any]:
        while self._name not in self._net.nodes:
            await asyncio.sleep(0.01)
        node = self._net.nodes[self._name]
        model = node.model
        cost = {"pass_cost": [{"tokens": 1, "seconds": 0.25}, {"tokens": 8, "seconds": 0.5}], "context_s": 0.125}
        limits = {"context_len": model.context_len, "vocab_size": model.vocab_size}
        limits["cache_tokens"] = node.tier.kv_admission.num_tokens
        return {"name": self._name, "model": "toy", **limits, **cost}

    def _lease(self, session: str, preferred: Sequence[str], affinity: str) -> Any:
        return self._net.lessor(self._name)(session)


@dataclass
class House:
    """Where to reach it, and what is inside; `call` runs a coroutine in its event loop."""

    grpc: str
    url: str
    model: str
    net: Net
    router: Router
    loop: asyncio.AbstractEventLoop

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LONG_S)

    def draft_in_time(self, patch: pytest.MonkeyPatch) -> None:
        """From now on a pass of the full tier takes so long that guesses come in time on a busy machine, too."""
        patch.setattr(self.net.nodes["full"].model, "pass_s", 0.02)

    def settle(self) -> None:
        """Wait until nothing is left of any request, on any tier or at the router."""

        async def quiet() -> None:
            places, full = self.router.admission.places, self.router._full
            await self.net.settle()
            await until(lambda: not (places.num_admitted or places.num_running or full.inboxes or full.downlink.num_sessions))

        self.call(quiet())
        assert not self.router.admission._active


@contextlib.asynccontextmanager
async def living(
    *,
    pass_s: float = 0.0005,
    model: Callable[..., CountingModel] = CountingModel,
    pace: tuple[float, ...] = (1, 2, 3),
    present: Sequence[str] = NAMES,
    full: dict[str, Any] | None = None,
    tracing: Callable[..., Tracing] = lambda *of: UNTRACED,
    **router: Any,
) -> AsyncIterator[House]:
    """A running server in this event loop; ``router`` and ``full``, the full tier's, are parts of the configuration.

    ``tracing`` says how the router and each tier make spans.

    Passes of the tiers, bottom to top, take ``pace`` times ``pass_s``. Those that are not ``present`` have no replica.
    """
    async with contextlib.AsyncExitStack() as stack:
        values = small.config().model_dump(mode="json")
        for section, changes in (full or {}).items():
            values["tiers"][-1][section] |= changes
        tokenizer = Tokenizer.from_pretrained(CascadeConfig.parse(values).tiers[-1].model_loading_config.source)
        net = Net()
        stack.push_async_callback(net.close)
        for level, name in enumerate(NAMES):
            if name not in present:
                continue
            lessors = {below: net.lessor(below) for below in NAMES[:level]}
            scorer = model(vocab_size=tokenizer.num_ids, agreement=AGREEMENT[name], pass_s=pass_s * pace[level])
            node = net.nodes[name] = Node(level, scorer, lessors, Grammars(tokenizer), tracing=tracing(name))
            await node.start()
        listen = ListenConfig(grpc_port=free_port(), http_port=free_port())
        # nothing is left of a request means: no held lease either
        values["router"] = {"listen": listen.model_dump(), "held_lease_s": 0.1, **router}
        entry = Router()
        handles: Any = {name: Handle(net, name) for name in NAMES}
        await entry.start(values, handles)
        stack.push_async_callback(entry.close)
        yield House(
            f"127.0.0.1:{listen.grpc_port}",
            f"http://127.0.0.1:{listen.http_port}",
            entry.model.names[0],
            net,
            entry,
            asyncio.get_running_loop(),
        )


@contextlib.contextmanager
def house(
    *, present: Sequence[str] = NAMES, tracing: Callable[..., Tracing] = lambda *of: UNTRACED, **options: Any
) -> Iterator[House]:
    """A running server in a thread of its own, see `living`."""

    @contextlib.asynccontextmanager
    async def live() -> AsyncIterator[House]:
        async with living(present=present, tracing=tracing, **options) as built:
            yield built
        await _let_go(asyncio.get_running_loop())

    with pytest.MonkeyPatch.context() as patch, start_blocking_portal(name="house") as portal:
        patch.setattr(replica_status, "count_replicas", lambda: dict.fromkeys(map(deployment, present), 1))  # nobody asks Ray
        if len(present) < len(NAMES):
            patch.setattr(api, "DESCRIBE_TIMEOUT_S", 0.05)
        patch.setattr(admission, "tracing", tracing)
        with portal.wrap_async_context_manager(live()) as built:
            yield built


def serving(env: Mapping[str, str] | None = None, scope: Any = "module", make: Any = house, **options: Any) -> Any:
    """A fixture: a `house` for all tests of a file, of whose requests nothing is left; ``env`` are variables that it reads."""

    @pytest.fixture(scope=scope)
    def served() -> Iterator[House]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            with make(**options) as built:
                yield built
                built.settle()

    return served


async def _let_go(loop: Any) -> None:
    """Until connections that the servers have closed have let go of their sockets, which a slow reader may put off."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            # those that are closed stay until the garbage is collected
            await until(lambda: not any(transport._sock for transport in loop._transports.values()))
            return
    for transport in list(loop._transports.values()):
        transport.abort()
    await asyncio.sleep(0)
