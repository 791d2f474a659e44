"""What a router takes of a core, and how soon its clients read a token, behind a full tier that takes no time.

The router is the served one, with its ports and a link, in a process of its own. The full tier behind it writes a token of each
stream every so often: together a thousand a second, whatever the number of streams. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import psutil

from benchmarks.document import console, finish, parsed, parser, stamp
from cascade import family
from cascade.client.client import AsyncClient
from cascade.draft import Draft
from cascade.engine.tokenizer import Tokenizer
from cascade.messages import Close, Commit, Edge, Link, Message, Open, Proposal
from cascade.params import SamplingParams
from deployments.links import replica_status
from deployments.links.leases import GivenLease
from deployments.links.uplink import LinkServer
from deployments.ops.launch import free_port
from deployments.router import Router

STREAMS = (32, 64)
RATE = 1000  # tokens a second of all streams together
SECONDS, QUICK_SECONDS = 5.0, 1.0  # of one measurement
ROUNDS = 3  # in which routers take turns
EDGES_EVERY = 8  # proposals, as sessions of the full tier do
PROMPT = "Explain why the sky is blue, and why sunsets are red. "
WRITTEN = "The sky is blue because air scatters short waves more than long ones; at dusk the light's way is longer. "
FULL = "full"
MODEL = "a full tier that takes no time"


# the tier


@dataclass(slots=True)
class Text:
    """What is written of one session."""

    up: Link
    committed: int
    end: int
    limit: int
    proposals: int = 0


class NullTier:
    """Takes the place of a tier under a `LinkServer`: one pass of no work every ``pass_s``, a token for each session."""

    name, hangs = FULL, False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._texts: dict[str, Text] = {}

    def post(self, messages: Sequence[Message], up: Link | None = None) -> None:
        for message in messages:
            if isinstance(message, Open):
                assert up is not None
                begin, spec = len(message.spec.tokens), message.spec
                self._texts[message.session] = Text(up, begin, begin, spec.prompt_len + spec.params.max_tokens)
            elif isinstance(message, Commit):
                self._texts[message.session].committed = message.start + len(message.tokens)
            elif isinstance(message, Close):
                self._texts.pop(message.session, None)

    def drop(self, up: Link) -> None:
        self._texts = {session: text for session, text in self._texts.items() if text.up is not up}

    async def run(self, rate: int) -> None:
        """Make passes for ever, so often that all sessions together get ``rate`` tokens a second."""
        due = time.monotonic()
        while True:
            due = max(due + len(self._texts) / rate, time.monotonic() - 1)
            await asyncio.sleep(max(0.001, due - time.monotonic()))
            sent: dict[int, tuple[Link, list[Message]]] = {}
            for session, text in self._texts.items():
                if text.end < text.limit:
                    text.end += 1
                    sent.setdefault(id(text.up), (text.up, []))[1].append(self._proposal(session, text))
            for up, messages in sent.values():
                up.send(messages)

    def _proposal(self, session: str, text: Text) -> Proposal:
        tokens = tuple(self._tokens[at % len(self._tokens)] for at in range(text.committed, text.end))
        edges = (Edge("", FULL, text.end, 0, 0, text.end),) if not text.proposals % EDGES_EVERY else ()
        text.proposals += 1
        return Proposal(session, text.committed, Draft(tokens, bytes(len(tokens))), edges)


class Method:
    """A method of a handle."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class Handle:
    """In place of Ray Serve's handle of the full tier, whose only replica is at ``ticket``."""

    def __init__(self, ticket: str, vocab_size: int) -> None:
        state = {"name": FULL, "context_len": 4096, "cache_tokens": 1 << 20, "vocab_size": vocab_size}
        self.describe = Method(lambda: _soon(state))
        self.lease = Method(lambda *arguments: Lease(ticket))

    def options(self, **options: object) -> "Handle":
        return self


async def _soon(value: Any) -> Any:
    return value


class Lease:
    """A lease that lasts."""

    def __init__(self, ticket: str) -> None:
        self._ticket = ticket

    async def __aiter__(self) -> AsyncIterator[str]:
        yield self._ticket

    def cancel(self) -> None: ...


class AllLeases(dict[str, GivenLease]):
    """Of a replica that takes whatever session comes."""

    def get(self, name: str, default: object = None) -> GivenLease:
        return GivenLease()


async def tier() -> None:
    """Serve the null tier until the process is ended; the first line says where."""
    server = LinkServer(null := NullTier(Tokenizer.from_pretrained(family.full()).encode_part(WRITTEN * 8)))  # type: ignore[arg-type]
    server.leases = AllLeases()
    await server.start("127.0.0.1")
    print(f"{server.address} {server.secret}", flush=True)
    await null.run(RATE)


async def router(ticket: str) -> None:
    """Serve a router of the tier at ``ticket`` until the process is ended; the first line says at which ports."""
    replica_status.count_replicas = lambda: {FULL: 1}
    ports = {"grpc_port": free_port(), "http_port": free_port()}
    source = {"model_id": family.MODEL, "model_source": family.full()}
    config = {
        "tiers": [{"name": FULL, "model_loading_config": source, "deployment_config": {"max_ongoing_requests": 256}}],
        "router": {"listen": ports, "max_running": 256},
    }
    served = Router()
    handles: Any = {FULL: Handle(ticket, Tokenizer.from_pretrained(family.full()).num_ids)}
    await served.start(config, handles)
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def process(*arguments: str, root: Path | None = None) -> Iterator[tuple[psutil.Process, str]]:
    """This file as another process, and its first line; with the packages of the checkout ``root``, or of this one."""
    env = os.environ | {"PYTHONPATH": str(root or Path(__file__).parents[1])}
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=root) as started:
        assert started.stdout is not None
        try:
            if not (line := started.stdout.readline()):
                raise SystemExit(f"{' '.join(arguments)} did not start")
            yield psutil.Process(started.pid), line
        finally:
            started.kill()


# the clients


@dataclass
class Read:
    """When the pieces of one answer came, seconds after it was asked for, and how many tokens they were."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0


async def over_http(port: int, max_tokens: int) -> Read:
    """One streamed chat completion."""
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    content, read, begin = json.dumps(body).encode(), Read(), time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}"
    kind = "Content-Type: application/json"
    writer.write(f"{head}\r\n{kind}\r\nConnection: close\r\n\r\n".encode() + content)
    last, rest = b"", b""
    while data := await reader.read(1 << 16):
        rest += data
        *events, rest = rest.split(b"\n\n")
        if written := [event for event in events if b'"delta":{"content":' in event]:
            read.times.append(time.perf_counter() - begin)
            last = written[-1]
        for event in events:
            if b'"usage":{' in event:
                read.tokens = json.loads(event[event.index(b"{") :])["usage"]["completion_tokens"]
    writer.close()
    assert last, "the router wrote nothing"
    return read


async def over_grpc(client: AsyncClient, max_tokens: int) -> Read:
    """One streamed answer."""
    read, begin = Read(), time.perf_counter()
    async for chunk in client.stream(PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True)):
        read.times.append(time.perf_counter() - begin)
        read.tokens += len(chunk.token_ids)
    return read


async def measure(protocol: str, ports: dict[str, int], streams: int, seconds: float, pid: psutil.Process) -> dict[str, float]:
    """One load: what the router took, and what its clients saw."""
    tokens = max(8, round(RATE * seconds / streams))
    async with AsyncClient(f"127.0.0.1:{ports['grpc_port']}") as client:

        def ask(num_tokens: int) -> Awaitable[Read]:
            return over_http(ports["http_port"], num_tokens) if protocol == "http" else over_grpc(client, num_tokens)

        await asyncio.gather(*(ask(4) for _ in range(4)))
        before, begin = pid.cpu_times(), time.perf_counter()
        reads = await asyncio.gather(*(ask(tokens) for _ in range(streams)))
        wall_s, after = time.perf_counter() - begin, pid.cpu_times()
    total, pieces = sum(read.tokens for read in reads), sum(len(read.times) for read in reads)
    gaps = [later - sooner for read in reads for sooner, later in zip(read.times, read.times[1:], strict=False)]
    return {
        "core_share": (after.user + after.system - before.user - before.system) * 1000 / total,
        "tokens_s": total / wall_s,
        "tokens_a_piece": total / pieces,
        "first_ms": 1e3 * median(read.times[0] for read in reads),
        "gap_ms": 1e3 * mean(gaps),
        "gap_p99_ms": 1e3 * quantiles(gaps, n=100)[98],
    }


def compare(roots: dict[str, Path | None], seconds: float, protocols: Sequence[str]) -> dict[str, Any]:
    """All loads of the routers of these checkouts, in turns: means of the rounds."""
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        _, ticket = stack.enter_context(process("--tier"))
        served = {}
        for name, root in roots.items():
            pid, line = stack.enter_context(process("--router", ticket.strip(), root=root))
            served[name] = (pid, json.loads(line))
        for protocol in protocols:
            for streams in STREAMS:
                seen: dict[str, list[dict[str, float]]] = {name: [] for name in served}
                for _ in range(ROUNDS if len(served) > 1 else 1):
                    for name, (pid, ports) in served.items():
                        seen[name].append(asyncio.run(measure(protocol, ports, streams, seconds, pid)))
                for name, rounds in seen.items():
                    of_protocol = figures.setdefault(name, {}).setdefault(protocol, {})
                    of_protocol[str(streams)] = {key: round(mean(round_[key] for round_ in rounds), 3) for key in rounds[0]}
                    console.print(name, protocol, streams, of_protocol[str(streams)])
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser("router", "What a router takes of a core for a thousand tokens a second.", ("http", "grpc"))
    made.add_argument("--against", type=Path, help="another checkout, whose router takes turns with this one's")
    made.add_argument("--tier", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--router", metavar="TICKET", help=argparse.SUPPRESS)
    chosen = made.parse_args(arguments)
    if chosen.tier:
        asyncio.run(tier())
    elif chosen.router:
        asyncio.run(router(chosen.router))
    else:
        chosen = parsed(made, arguments)
        roots = {"router": None} | ({} if chosen.against is None else {"before": chosen.against.resolve()})
        seconds = QUICK_SECONDS if chosen.quick else SECONDS
        figures = compare(roots, seconds, chosen.only or ("http", "grpc"))
        line = {
            name: {
                protocol: {streams: cell["core_share"] for streams, cell in loads.items()}
                for protocol, loads in protocols.items()
            }
            for name, protocols in figures.items()
        }
        finish(figures | {"model": MODEL} | stamp(MODEL), line, chosen.results)


if __name__ == "__main__":
    main()
