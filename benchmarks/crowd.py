"""Clients that keep a server busy at one level, and the tokens that come."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from benchmarks.turns import Mode, Stream, isolated
from cascade.answer import Chunk
from cascade.params import SamplingParams

LOOK_S = 0.01  # between two looks at what has come


@dataclass(slots=True)
class Crowd:
    """Clients that send requests of one mode, one after another, until they are told to stop.

    Who asks what is the same in every crowd with the same ``first`` seed. Answers are half to one and a half times as long as
    ``params`` say: else clients without drafts would read and write in step for ever, as no users do.
    """

    stream: Stream
    mode: Mode
    params: SamplingParams
    prompts: Sequence[Sequence[int]]
    first: int = 0  # the seed of the first client's first request
    tokens: int = 0  # that have come
    texts: dict[int, list[int]] = field(default_factory=dict)  # by seed, as far as they have come
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def grow(self, load: int) -> None:
        """Let there be ``load`` clients."""
        for number in range(len(self._tasks), load):
            self._tasks.append(asyncio.create_task(self._send(number)))

    async def stop(self, left: int = 0) -> None:
        """Break off the requests of all clients but the first ``left``; raises what went wrong with any of them."""
        gone, self._tasks = self._tasks[left:], self._tasks[:left]
        for task in gone:
            task.cancel()
        for outcome in await asyncio.gather(*gone, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def rate(self, seconds: float) -> float:
        """Tokens that come in a second, seen for so long."""
        loop = asyncio.get_running_loop()
        tokens, begin = self.tokens, loop.time()
        await asyncio.sleep(seconds)
        return (self.tokens - tokens) / (loop.time() - begin)

    async def rate_of(self, tokens: int) -> float:
        """Tokens that come in a second, seen until so many have come, or until something goes wrong, which `stop` raises."""
        loop = asyncio.get_running_loop()
        before, begin = self.tokens, loop.time()
        while self.tokens - before < tokens and not any(task.done() for task in self._tasks):
            await asyncio.sleep(LOOK_S)
        return (self.tokens - before) / (loop.time() - begin)

    def prompt(self, seed: int) -> Sequence[int]:
        """Of the request with that seed."""
        return self.prompts[seed % len(self.prompts)]

    def _length(self, seed: int) -> int:
        """Of that request's answer, in tokens. A large prime scatters the lengths of neighbouring seeds."""
        mean = self.params.max_tokens
        return mean // 2 + seed * 7919 % (mean + 1)

    async def _send(self, number: int) -> None:
        for place in itertools.count():
            seed = self.first + number + 1000 * place
            text = self.texts.setdefault(seed, [])
            params = replace(self.params, seed=seed, max_tokens=self._length(seed))
            answer = self.stream(list(self.prompt(seed)), params, self.mode.speculation, isolated())
            async with contextlib.aclosing(cast(AsyncGenerator[Chunk, Any], answer)) as chunks:
                async for chunk in chunks:
                    text += chunk.token_ids
                    self.tokens += len(chunk.token_ids)
