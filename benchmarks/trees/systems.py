"""The embedded family behind its two doors: the library in this process, and a server. Both on the processor, in one dtype."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeAlias

from benchmarks import passes
from cascade import family
from cascade.answer import Completion
from cascade.client import AsyncClient
from cascade.engine.threads import apart
from cascade.local import Cascade
from cascade.params import Handling, SamplingParams, Speculation
from cascade.settings.config import CascadeConfig
from deployments.launch.server import Server

DTYPES = ("float32", "bfloat16")
TIMED = ("1", "8")  # tokens of the passes that are timed: what the full model does alone, and what it does with guesses

Ask: TypeAlias = Callable[[str, SamplingParams, Speculation, Handling], Awaitable[Completion]]
Clients: TypeAlias = Callable[[], AbstractAsyncContextManager[Ask]]
System: TypeAlias = Callable[[str], AbstractContextManager[Clients]]  # by dtype


def pass_ms() -> dict[str, float]:
    """Milliseconds of the full model's passes, by dtype: the least is that of the one to serve in."""
    full = family.paths()[-1]
    found = {dtype: apart(lambda dtype=dtype: passes.passes(full, dtype)) for dtype in DTYPES}  # type: ignore[misc]
    return {dtype: round(sum(times[tokens] for tokens in TIMED), 2) for dtype, times in found.items()}


@contextmanager
def library(dtype: str) -> Iterator[Clients]:
    """As programs use it."""
    with Cascade.from_pretrained(family.paths(), dtype=dtype, device="cpu") as cascade:

        async def ask(prompt: str, params: SamplingParams, speculation: Speculation, handling: Handling) -> Completion:
            completion = await cascade.agenerate(prompt, params, speculation, handling)
            assert isinstance(completion, Completion)
            return completion

        @asynccontextmanager
        async def clients() -> AsyncIterator[Ask]:
            yield ask

        yield clients


@contextmanager
def door(dtype: str) -> Iterator[Clients]:
    """What `cascade serve` serves, over gRPC."""
    with Server.start(config(dtype), port=0) as server:

        @asynccontextmanager
        async def clients() -> AsyncIterator[Ask]:
            async with AsyncClient(server.address) as client:
                yield client.generate

        yield clients


def config(dtype: str) -> dict[str, Any]:
    """The demo's, in another dtype."""
    values = CascadeConfig.demo().model_dump(mode="json", exclude_unset=True)
    for tier in values["tiers"]:
        tier["engine_kwargs"]["dtype"] = dtype
    return values
