"""How long a message takes from one tier to the next: half of an Open and its Proposal, over a real link, on two cores."""

import asyncio
import statistics
import threading
import time

import grpc

from cascade.chain.tier import Tier
from cascade.messages import Open
from cascade.params import SamplingParams
from cascade.simulation.toy import ToyModel
from cascade.v1 import link_pb2_grpc
from deployments.links.codec import decode, encode
from deployments.links.uplink import CHANNEL_OPTIONS, LinkServer, authorization

PINGS = 300


def serve() -> tuple[str, str]:
    """Run a tier with a toy model in this process, with leases for all pings; its address and secret."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start() -> tuple[str, str]:
        tier = Tier("toy", 0, ToyModel())
        tier.start()
        server = LinkServer(tier)
        await server.start("127.0.0.1")
        for ping in range(PINGS):
            server.leases.add(str(ping))
        return server.address, server.secret

    return asyncio.run_coroutine_threadsafe(start(), loop).result()


async def measure(address: str, secret: str) -> float:
    """Median seconds of one hop to the tier at ``address``."""
    params = SamplingParams(max_tokens=1, temperature=0, seed=0)
    times = []
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = link_pb2_grpc.LinkStub(channel).Connect(metadata=(("authorization", authorization(secret)),))
        for ping in range(PINGS):
            begin = time.perf_counter()
            await call.write(encode([Open(str(ping), (1, 2), 2, params)]))
            decode(await call.read())
            times.append((time.perf_counter() - begin) / 2)
        call.cancel()
    return statistics.median(times)
