"""Clients outside of the cluster: `python -m tests.nodes.crowd` on a host does what lines of JSON say.

It needs neither Ray nor torch. `tests.nodes.nodes.Outside` is the other end.
"""

import asyncio
import itertools
import json
import sys
import urllib.request
from typing import Any

from cascade import SamplingParams, Speculation
from cascade.client import AsyncClient

DEADLINE_S = 240.0  # of each request: one that hangs fails
Request = dict[str, Any]  # a ``prompt``, ``params`` and the ``tiers`` to use, ``None`` for whatever the planner thinks


def arguments(request: Request) -> dict[str, Any]:
    speculation = None if request["tiers"] is None else Speculation(tiers=tuple(request["tiers"]))
    return {"prompt": request["prompt"], "params": SamplingParams(**request["params"]), "speculation": speculation}


def essence(completion: Any) -> dict[str, Any]:
    edges = [[edge.drafter, edge.verifier, edge.accepted] for edge in completion.stats.edges]
    return {"text": completion.text, "token_ids": list(completion.token_ids), "edges": edges}


class Servant:
    """Does what it is asked, one thing at a time; its clients stream one answer after the other meanwhile."""

    def __init__(self) -> None:
        self._clients: list[asyncio.Task[None]] = []
        self._begun = set[int]()
        self._answers: list[dict[str, Any]] = []
        self._stopping = False

    async def ask(self, address: str, request: Request) -> dict[str, Any]:
        async with AsyncClient(address, timeout=DEADLINE_S) as client:
            return essence(await client.generate(**arguments(request)))

    async def describe(self, address: str) -> dict[str, int]:
        """Replicas of each tier as the router at ``address`` knows them, none where nobody answers."""
        try:
            async with AsyncClient(address, timeout=10.0, patience_s=0.0) as client:
                return {tier.name: tier.replicas for tier in (await client.describe()).tiers}
        except Exception:  # it is not there, or not yet
            return {}

    async def http(self, url: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.loads(await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=DEADLINE_S).read()))

    async def begin(self, addresses: list[str], requests: list[Request], num_clients: int) -> None:
        """Let clients ask, the requests in turn; returns when each has had the first piece of an answer."""
        self._begun, self._answers, self._stopping, numbers = set(), [], False, itertools.count()

        async def client(number: int) -> None:
            first = number % len(addresses)
            turned = [*addresses[first:], *addresses[:first]]
            async with AsyncClient(turned, timeout=DEADLINE_S, patience_s=DEADLINE_S) as client:
                while not self._stopping:
                    index = next(numbers) % len(requests)
                    self._answers.append({"request": index, **await self._answer(client, number, requests[index])})

        self._clients = [asyncio.create_task(client(number)) for number in range(num_clients)]
        while len(self._begun) < num_clients and not any(task.done() for task in self._clients):
            await asyncio.sleep(0.02)

    async def _answer(self, client: AsyncClient, number: int, request: Request) -> dict[str, Any]:
        outcome: dict[str, Any] = {"error": None}
        try:
            async for piece in client.stream(**arguments(request)):
                self._begun.add(number)
                if piece.completion is not None:
                    outcome |= essence(piece.completion)
        except Exception as error:  # whatever the client raises is what the test wants to know
            outcome["error"] = f"{type(error).__name__}: {error}"
        return outcome

    async def ended(self) -> int:
        return len(self._answers)

    async def end(self) -> list[dict[str, Any]]:
        """All answers, when those that are being written have ended."""
        self._stopping = True
        await asyncio.gather(*self._clients)
        return self._answers


async def main() -> None:
    servant = Servant()
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        try:
            answer = {"answer": await getattr(servant, command.pop("do"))(**command)}
        except Exception as error:  # the other end raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
