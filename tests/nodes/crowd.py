"""Clients outside of the cluster: `python -m tests.nodes.crowd` on a host does what lines of JSON say.

It needs neither Ray nor torch. `tests.nodes.nodes.Outside` is the other end.
"""

import asyncio
import itertools
import json
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

from cascade import SamplingParams, Speculation
from cascade.client import AsyncClient

DEADLINE_S = 240.0  # of each request: one that hangs fails


class Crowd:
    """Clients that each stream one answer after the other, to the requests in turn, until they are told to stop."""

    def __init__(self, addresses: Sequence[str], requests: Sequence[dict[str, Any]], num_clients: int) -> None:
        self._addresses = addresses
        self._requests = requests
        self._stopping = False
        self._begun = set[int]()
        self._numbers = itertools.count()
        self.num_ended = 0
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(num_clients)]

    async def begun(self) -> None:
        """Return when each client has had the first piece of an answer."""
        while len(self._begun) < len(self._tasks) and not any(task.done() for task in self._tasks):
            await asyncio.sleep(0.02)

    async def stop(self) -> list[dict[str, Any]]:
        """All answers, when those that are being written have ended."""
        self._stopping = True
        return [answer for answers in await asyncio.gather(*self._tasks) for answer in answers]

    async def _client(self, number: int) -> list[dict[str, Any]]:
        answers = []
        turned = [*self._addresses[number % len(self._addresses) :], *self._addresses[: number % len(self._addresses)]]
        async with AsyncClient(turned, timeout=DEADLINE_S, patience_s=DEADLINE_S) as client:
            while not self._stopping:
                index = next(self._numbers) % len(self._requests)
                answers.append(await self._answer(client, number, index))
                self.num_ended += 1
        return answers

    async def _answer(self, client: AsyncClient, number: int, index: int) -> dict[str, Any]:
        told: dict[str, Any] = {"request": index, "error": None}
        try:
            async for piece in client.stream(**arguments(self._requests[index])):
                self._begun.add(number)
                if piece.completion is not None:
                    told |= essence(piece.completion)
        except Exception as error:  # whatever the client raises is what the test wants to know
            told["error"] = f"{type(error).__name__}: {error}"
        return told


def arguments(request: dict[str, Any]) -> dict[str, Any]:
    """Of a client's call: ``prompt``, ``params`` and the ``tiers`` to use, ``None`` for whatever the planner thinks."""
    tiers = request["tiers"]
    return {
        "prompt": request["prompt"],
        "params": SamplingParams(**request["params"]),
        "speculation": None if tiers is None else Speculation(tiers=tuple(tiers)),
    }


def essence(completion: Any) -> dict[str, Any]:
    """What a test looks at."""
    edges = [[edge.drafter, edge.verifier, edge.accepted] for edge in completion.stats.edges]
    return {"text": completion.text, "token_ids": list(completion.token_ids), "edges": edges}


class Servant:
    """Does what it is asked, one thing at a time; a crowd goes on meanwhile."""

    def __init__(self) -> None:
        self._crowd: Crowd | None = None

    async def ask(self, address: str, request: dict[str, Any]) -> dict[str, Any]:
        """One answer, whole."""
        async with AsyncClient(address, timeout=DEADLINE_S) as client:
            return essence(await client.generate(**arguments(request)))

    async def describe(self, address: str) -> dict[str, int]:
        """Replicas of each tier as the router at ``address`` knows them, none where nobody answers."""
        try:
            async with AsyncClient(address, timeout=10.0, patience_s=0.0) as client:
                return {tier.name: tier.replicas for tier in (await client.describe()).tiers}
        except Exception:  # it is not there, or not yet
            return {}

    async def http(self, url: str, body: dict[str, Any] | None = None) -> Any:
        """What a server says over HTTP."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        return json.loads(await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=DEADLINE_S).read()))

    async def begin(self, addresses: list[str], requests: list[dict[str, Any]], num_clients: int) -> None:
        """A crowd, all of whose clients have had a piece."""
        self._crowd = Crowd(addresses, requests, num_clients)
        await self._crowd.begun()

    async def ended(self) -> int:
        """How many answers of the crowd are whole, or have failed."""
        assert self._crowd is not None
        return self._crowd.num_ended

    async def end(self) -> list[dict[str, Any]]:
        """What the crowd was answered."""
        assert self._crowd is not None
        crowd, self._crowd = self._crowd, None
        return await crowd.stop()


async def main() -> None:
    servant = Servant()
    while line := await asyncio.to_thread(sys.stdin.readline):
        said = json.loads(line)
        try:
            answer = {"answer": await getattr(servant, said.pop("do"))(**said)}
        except Exception as error:  # the other end raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
