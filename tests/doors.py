"""A whole server in this process, without Ray: toy tiers joined by real links, and a router behind its own doors."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from cascade.engine.grammar import Grammars
from cascade.engine.tokenizer import Tokenizer
from cascade.settings.config import CascadeConfig
from cascade.settings.router import ListenConfig
from deployments.gateway.admission import admission
from deployments.links import replica_status
from deployments.ops.launch import free_port
from deployments.ops.tracing import UNTRACED, Tracing
from deployments.router import Router
from tests import small
from tests.gateway.test_router import Handle, Stoppable
from tests.links.net import Net, Node
from tests.tier.test_tier import NAMES, CountingModel
from tests.waiting import LONG_S, until

T = TypeVar("T")
VOCAB = 4096  # of the small models's tokenizer
AGREEMENT = {"tiny": 0.6, "medium": 0.8, "full": 1.0}


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

    def settle(self) -> None:
        """Wait until nothing is left of any request, on any tier or at the router."""

        async def quiet() -> None:
            places, full = self.router.admission.places, self.router._full
            await self.net.settle()
            await until(lambda: not (places.num_admitted or places.num_running or full.inboxes or full.downlink.num_sessions))

        self.call(quiet())
        assert not self.router.admission._active


@contextlib.contextmanager
def house(
    *,
    pass_s: float = 0.0005,
    model: Callable[..., CountingModel] = CountingModel,
    pace: tuple[float, ...] = (1, 2, 3),
    full: dict[str, Any] | None = None,
    tracing: Callable[..., Tracing] = lambda *of: UNTRACED,
    **router: Any,
) -> Iterator[House]:
    """A running server; ``router`` and ``full``, the full tier's, are parts of the configuration.

    ``tracing`` says how the router and each tier make spans.

    Passes of the tiers, bottom to top, take ``pace`` times ``pass_s``.
    """
    ready, stop = threading.Event(), asyncio.Event()
    result: list[House | BaseException] = []

    async def live() -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                result.append(await _build(stack, [pass_s * share for share in pace], model, full or {}, router, tracing))
                ready.set()
                await stop.wait()
        except BaseException as error:
            result.insert(0, error)
            raise
        finally:
            ready.set()

    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_until_complete(live())
        loop.run_until_complete(_let_go(loop))
        loop.run_until_complete(loop.shutdown_default_executor())

    thread = threading.Thread(target=run, name="house")
    patch = pytest.MonkeyPatch()
    patch.setattr(replica_status, "count_replicas", lambda: dict.fromkeys(NAMES, 1))  # nobody asks Ray
    patch.setattr(admission, "tracing", tracing)
    thread.start()
    try:
        assert ready.wait(LONG_S)
        built = result[0]
        if isinstance(built, BaseException):
            raise built
        yield built
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(LONG_S)
        patch.undo()
        loop.close()


def serving(env: Mapping[str, str] | None = None, scope: Any = "module", **options: Any) -> Any:
    """A fixture: a `house` for all tests of a file, of whose requests nothing is left; ``env`` are variables that it reads."""

    @pytest.fixture(scope=scope)
    def served() -> Iterator[House]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            with house(**options) as built:
                yield built
                built.settle()

    return served


async def _let_go(loop: Any) -> None:
    """Until connections that the doors have closed have let go of their sockets, which a slow reader may put off."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            # those that are closed stay until the garbage is collected
            await until(lambda: not any(transport._sock for transport in loop._transports.values()))
            return
    for transport in list(loop._transports.values()):
        transport.abort()
    await asyncio.sleep(0)


async def _build(
    stack: contextlib.AsyncExitStack,
    pass_s: Sequence[float],
    model: Callable[..., CountingModel],
    full: dict[str, Any],
    options: dict[str, Any],
    tracing: Callable[..., Tracing],
) -> House:
    values = small.config().model_dump(mode="json")
    for section, changes in full.items():
        values["tiers"][-1][section] |= changes
    tokenizer = Tokenizer.from_pretrained(CascadeConfig.parse(values).tiers[-1].model_loading_config.source)
    net = Net()
    stack.push_async_callback(net.close)
    for level, name in enumerate(NAMES):
        lessors = {below: net.lessor(below) for below in NAMES[:level]}
        scorer = model(vocab_size=tokenizer.num_ids, agreement=AGREEMENT[name], pass_s=pass_s[level])
        node = net.nodes[name] = Node(level, scorer, lessors, Grammars(tokenizer), tracing=tracing(name))
        await node.start()
    listen = ListenConfig(grpc_port=free_port(), http_port=free_port())
    # nothing is left of a request means: no held lease either
    values["router"] = {"listen": listen.model_dump(), "held_lease_s": 0.1, **options}
    router = Stoppable.__new__(Stoppable)
    handles: Any = {name: Handle(net, name) for name in NAMES}
    await Router.__init__(router, values, handles)
    stack.push_async_callback(Router.__del__, router)
    return House(
        f"127.0.0.1:{listen.grpc_port}",
        f"http://127.0.0.1:{listen.http_port}",
        router.model.names[0],
        net,
        router,
        asyncio.get_running_loop(),
    )
