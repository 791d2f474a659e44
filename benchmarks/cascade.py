"""The cascade against its full model alone, in one run, through the running gRPC server. Under ten minutes on two cores.

    make bench-cascade

A core is a device here. The embedded full model is *grown* to 200 M parameters: same function, real cost. It has core 0 to
itself (one thread, pinned, bfloat16 where the processor has it); the lower tiers, the router and everything else share core 1.
The modes take turns on every prompt: full alone, the best lockstep pair, the best asynchronous pair, the cascade of three tiers
(which leaves out those that do not pay), and all three always; beside them Transformers' ``generate`` and assisted generation
on core 0. The full model alone with both cores is a server of its own, measured after.

What each mode should give is predicted from the recorded agreement of the tiers along the texts that were written, and from
prices of passes, hops and messages, each measured by itself beside what it runs beside in that mode. The last line is one JSON
document.
"""

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Console

from benchmarks import hop, price, reference
from benchmarks.price import Price
from cascade import family
from cascade.bench.measure import PROMPTS, Measured, Mode, measure
from cascade.chain.profile import PassCost
from cascade.cli import screen
from cascade.client import Client
from cascade.engine.devices import has_bfloat16, processor
from cascade.params import DEFAULT_WINDOW, SamplingParams, Speculation
from cascade.simulation.forecast import Bench, TierCost
from cascade.simulation.trace import Trace
from deployments.app import HUGE_PAGES
from deployments.launch.server import Server

WORK = Path(__file__).parent / ".work"
RESULTS = Path(__file__).parent / "results"
FULL_CORE, OTHER_CORE = 0, 1
FULL_DTYPE = "bfloat16" if has_bfloat16() else "float32"  # what this processor is fast with
MAX_TOKENS = 128
CONTEXT = 100  # positions before a pass, on average
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, seed=0, ignore_eos=True)
DRAFTERS = ("tiny", "medium")
LOCKSTEP_WINDOWS = (4, 8, 12, 16)
IDLE_S, STEADY = 5.0, 6
SETTLE_S = 0.3  # until those who work beside do
MODES = ("alone", "lockstep_pair", "async_pair", "async_three", "async_three_always")
console = Console(stderr=True)

Points: TypeAlias = tuple[tuple[int, float], ...]
# of a lower tier: in turns with the full one, beside it, beside it and the other lower one
Company: TypeAlias = Literal["lockstep", "pair", "three"]


def tier(name: str, source: str, dtype: str, cores: list[int]) -> dict[str, Any]:
    """One tier of the configuration, pinned to ``cores``."""
    return {
        "name": name,
        "model_loading_config": {"model_id": name, "model_source": source},
        "engine_kwargs": {"dtype": dtype, "num_threads": len(cores), "cpu_affinity": cores},
        "deployment_config": {"ray_actor_options": {"num_cpus": 0}},
    }


def cascade_config(full: str) -> dict[str, Any]:
    """Three tiers: the full one on its core, the others on the other."""
    tiny, medium, _ = family.paths()
    return {
        "tiers": [
            tier("tiny", tiny, "float32", [OTHER_CORE]),
            tier("medium", medium, "float32", [OTHER_CORE]),
            tier("full", full, FULL_DTYPE, [FULL_CORE]),
        ]
    }


def fastest(client: Client, modes: list[Mode]) -> Mode:
    """The fastest of all, found on two prompts."""
    results = measure(client.stream, modes, PARAMS, prompts=PROMPTS[:2])
    for result in results:
        console.print(f"  {result.mode.name}: {result.tokens_per_second:.1f} tokens/s")
    return max(results, key=lambda result: result.tokens_per_second).mode


def lockstep_pairs() -> list[Mode]:
    return [
        Mode(f"lockstep pair, {drafter}, window {window}", Speculation(tiers=(drafter,), window=window, schedule="lockstep"))
        for drafter, window in itertools.product(DRAFTERS, LOCKSTEP_WINDOWS)
    ]


def async_pairs() -> list[Mode]:
    return [Mode(f"async pair, {drafter}", Speculation(tiers=(drafter,))) for drafter in DRAFTERS]


def busy_s(core: int) -> float:
    """Seconds that those threads have worked which may run on this core alone: ours, whatever else the machine does."""
    seconds = 0.0
    for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.sched_getaffinity(int(task.name)) == {core}:
                seconds += price.processor_s(task)
    return seconds


def front_cost(client: Client) -> tuple[float, float]:
    """Seconds of the other core that bring a piece of an answer to the client; the share of it that Ray takes always."""
    begin, since = busy_s(OTHER_CORE), time.perf_counter()
    time.sleep(IDLE_S)
    idle = (busy_s(OTHER_CORE) - begin) / (time.perf_counter() - since)
    begin, since = busy_s(OTHER_CORE), time.perf_counter()
    pieces = sum(len(list(client.stream(prompt, PARAMS, Speculation("off")))) for prompt in PROMPTS[:2])
    busy = busy_s(OTHER_CORE) - begin - idle * (time.perf_counter() - since)
    return max(0.0, busy / pieces), idle


@dataclass(frozen=True)
class Costs:
    """What the simulator has to know, in seconds."""

    full: Points  # tokens and seconds of the full tier's passes, as the server itself has timed them
    front_s: float  # of the other core, for each piece of an answer
    taken: float  # share of the other core that Ray takes when nothing is asked
    hop_s: float = 0.0  # of a message from tier to tier, the time at both ends in it
    curves: Mapping[str, Points] = field(default_factory=dict)  # of lower tiers' passes, seconds of their core by tokens
    prices: Mapping[tuple[Company, str], Price] = field(default_factory=dict)  # of a lower tier in such company


def measure_cascade(full: str, worker: ProcessPoolExecutor) -> tuple[list[Measured], dict[str, float], Costs]:
    """The server's modes and Transformers' own tokens per second, measured in turns; and what the server's passes cost."""
    medium = family.paths()[1]
    own: dict[str, list[tuple[int, float]]] = {"transformers_generate": [], "transformers_assisted": []}
    with Server.start(cascade_config(full), port=0) as server, Client(server.address) as client:
        modes = [
            Mode("alone", Speculation("off")),
            fastest(client, lockstep_pairs()),
            fastest(client, async_pairs()),
            Mode("async_three", Speculation()),
            Mode("async_three_always", Speculation(tiers=DRAFTERS)),
        ]
        front = front_cost(client)
        measure(client.stream, modes[3:4], PARAMS)  # a server that runs has found out what pays
        results = [Measured(mode) for mode in modes]
        for prompt in PROMPTS:
            for result, again in zip(results, measure(client.stream, modes, PARAMS, prompts=[prompt]), strict=True):
                result.merge(again)
            for name, assistant in (("transformers_generate", None), ("transformers_assisted", (medium, FULL_DTYPE))):
                own[name].append(worker.submit(reference.generate, full, FULL_DTYPE, prompt, MAX_TOKENS, assistant).result())
            console.print(f"  {len(results[0].texts)}/{len(PROMPTS)} prompts")
        timed_full = client.describe().tiers[-1]
    points = tuple((tokens, seconds + timed_full.context_s * CONTEXT) for tokens, seconds in timed_full.pass_cost)
    rates = {name: sum(n for n, _ in runs) / sum(s for _, s in runs) for name, runs in own.items()}
    return results, rates, Costs(points, *front)


def measure_both_cores(full: str) -> float:
    """Tokens per second of the full model alone with both cores."""
    config = {"tiers": [tier("full", full, FULL_DTYPE, [FULL_CORE, OTHER_CORE])]}
    with Server.start(config, port=0) as server, Client(server.address) as client:
        [result] = measure(client.stream, [Mode("alone_both_cores", Speculation("off"))], PARAMS)
    return result.tokens_per_second


@contextlib.contextmanager
def busy(worker: ProcessPoolExecutor, source: str, dtype: str) -> Iterator[None]:
    """Meanwhile ``worker`` runs passes of a model."""
    with tempfile.TemporaryDirectory() as folder:
        working = worker.submit(reference.keep_busy, source, dtype, Path(folder))
        time.sleep(SETTLE_S)
        try:
            yield
        finally:
            (Path(folder) / reference.STOP).touch()
            working.result()


async def add_prices(full: str, worker: ProcessPoolExecutor, known: Costs) -> Costs:
    """What passes of the lower tiers cost by tokens, and one of a token and a message where they are served; hops too."""
    hop_s = await hop.measure(*worker.submit(hop.serve).result())
    curves: dict[str, Points] = {}
    prices: dict[tuple[Company, str], Price] = {}
    tiny, medium, _ = family.paths()
    spawn = get_context("spawn")
    worker.submit(reference.verify, full, FULL_DTYPE).result()
    for name, source, other in (("tiny", tiny, medium), ("medium", medium, tiny)):
        with (
            ProcessPoolExecutor(1, spawn, reference.pin, ([OTHER_CORE],)) as lower,
            ProcessPoolExecutor(1, spawn, reference.pin, ([OTHER_CORE],)) as beside,
        ):
            beside.submit(reference.pass_costs, other, "float32").result()
            ticket = lower.submit(price.serve, source, "float32").result()
            await price.price(lower, ticket, "0", DEFAULT_WINDOW)  # the first passes of a process are no measure

            def verify() -> "asyncio.Future[None]":
                return asyncio.wrap_future(worker.submit(reference.verify, full, FULL_DTYPE))

            prices["lockstep", name] = await price.price(lower, ticket, "1", LOCKSTEP_WINDOWS[-1], verify)
            with busy(worker, full, FULL_DTYPE):
                curves[name] = tuple(lower.submit(reference.pass_costs, source, "float32").result())
                prices["pair", name] = await price.price(lower, ticket, "2", DEFAULT_WINDOW)
                with busy(beside, other, "float32"):
                    prices["three", name] = await price.price(lower, ticket, "3", DEFAULT_WINDOW)
        console.print(f"  pass of {name}: " + ", ".join(f"{n}: {s * 1e3:.2f} ms" for n, s in curves[name]))
    for (company, name), one in prices.items():
        console.print(f"  {name}, {company}: pass {one.pass_s * 1e3:.2f} ms, message {one.message_s * 1e3:.2f} ms")
    return replace(known, hop_s=hop_s, curves=curves, prices=prices)


def tier_costs(known: Costs, company: Company, names: list[str]) -> tuple[TierCost, ...]:
    """Of all tiers, in such company."""
    left = 1 - known.taken
    dearest, costs = max(known.prices[company, name].message_s for name in names[:-1]), []
    for name in names[:-1]:
        one, curve = known.prices[company, name], known.curves[name]
        points = tuple((tokens, (one.pass_s + seconds - curve[0][1]) / left) for tokens, seconds in curve)
        wire_s = max(0.0, known.hop_s - 2 * one.message_s)
        costs.append(TierCost(name, PassCost(points=points), wire_s, device=str(OTHER_CORE), message_s=one.message_s / left))
    return (*costs, TierCost(names[-1], PassCost(points=known.full), device=str(FULL_CORE), message_s=dearest))


def predict(full: str, worker: ProcessPoolExecutor, results: list[Measured], known: Costs) -> dict[str, float]:
    """Tokens per second that the simulator expects of each mode, from costs and agreement measured on this machine."""
    tiny, medium, _ = family.paths()
    tiers = {"tiny": (tiny, "float32"), "medium": (medium, "float32"), "full": (full, FULL_DTYPE)}
    names = list(tiers)
    said: list[list[int]] = [[] for _ in tiers]
    for prompt, text in zip(PROMPTS, results[0].texts, strict=True):
        for own, (source, dtype) in zip(said, tiers.values(), strict=True):
            own += worker.submit(reference.own_tokens, source, dtype, prompt, text).result()
    front_s = known.front_s / (1 - known.taken)
    predictions = {}
    for mode, result in zip(MODES, results, strict=True):
        asked = result.mode.speculation
        chosen = names if asked.tiers is None else [*asked.tiers, "full"]
        chosen = ["full"] if asked.mode == "off" else chosen
        lockstep = asked.schedule == "lockstep"
        # one that may leave tiers out ends as a pair here
        company: Company = "lockstep" if lockstep else "three" if len(chosen) == len(names) and not asked.adaptive else "pair"
        num_tokens = (STEADY if asked.adaptive else 1) * len(said[0])  # what pays was found out long ago
        bench = Bench(
            tier_costs(known, company, names),
            Trace.recorded(said),
            num_tokens,
            front_device=str(OTHER_CORE),
            front_s=front_s,
        )
        outcome = bench.outcome(
            [names.index(n) for n in chosen],
            lockstep=lockstep,
            window=asked.draft_window(DEFAULT_WINDOW),
            adaptive=asked.adaptive,
        )
        predictions[mode] = outcome.tokens_per_s
    return predictions


def timed(label: str, work: Callable[[], Any]) -> Any:
    console.print(f"[bold]{label}[/]")
    begin = time.perf_counter()
    result = work()
    console.print(f"  {time.perf_counter() - begin:.0f} s")
    return result


def main() -> None:
    full = str(WORK / "full-200m")
    # everything that is not pinned elsewhere inherits this: Ray, the router, this client
    os.sched_setaffinity(0, [OTHER_CORE])
    os.environ.update(HUGE_PAGES)  # what is compared and priced in processes of its own has the same memory as the tiers
    with ProcessPoolExecutor(1, get_context("spawn"), reference.pin, ([FULL_CORE],)) as worker:
        parameters = timed("Growing the full model", lambda: worker.submit(reference.grow_full, Path(full)).result())
        results, rates, costs = timed("Serving three tiers", lambda: measure_cascade(full, worker))
        both = timed("Serving the full model on both cores", lambda: measure_both_cores(full))
        costs = timed("Finding prices", lambda: asyncio.run(add_prices(full, worker, costs)))
        predicted = timed("Predicting", lambda: predict(full, worker, results, costs))
    report(results, rates, both, predicted, parameters, costs)


def measured_costs(costs: Costs) -> dict[str, Any]:
    """What the simulator was told, for the JSON document."""
    return {
        "hop_ms": round(costs.hop_s * 1e3, 3),
        "lower_prices_ms": {
            f"{name}, {company}": {"pass": round(one.pass_s * 1e3, 2), "message": round(one.message_s * 1e3, 3)}
            for (company, name), one in costs.prices.items()
        },
        "taken_by_ray": round(costs.taken, 3),
        "front_ms": round(costs.front_s * 1e3, 3),
        "full_pass_ms": {tokens: round(seconds * 1e3, 1) for tokens, seconds in costs.full},
    }


def report(
    results: list[Measured],
    rates: dict[str, float],
    both: float,
    predicted: dict[str, float],
    parameters: int,
    costs: Costs,
) -> None:
    """Tables to standard error, the JSON document to a file and to the last line of standard output."""
    alone, locked, pair, three, always = results
    console.print(screen.speeds(results, "alone"), screen.acceptance(always.edges.values()))
    served = {name: result.tokens_per_second for name, result in zip(MODES, results, strict=True)}
    speeds = served | {"alone_both_cores": both} | rates
    top = [edge for edge in three.edges.values() if edge.verifier == "full"]
    passes = max(1, sum(edge.passes for edge in top))
    document = {
        "tokens_per_second": {name: round(speed, 2) for name, speed in speeds.items()},
        "predicted": {name: round(speed, 2) for name, speed in predicted.items()},
        "ratios": {
            "three_vs_alone": round(speeds["async_three"] / speeds["alone"], 3),
            "three_vs_lockstep_pair": round(speeds["async_three"] / speeds["lockstep_pair"], 3),
            "three_vs_alone_both_cores": round(speeds["async_three"] / both, 3),
            "three_vs_async_pair": round(speeds["async_three"] / speeds["async_pair"], 3),
            "alone_vs_transformers_generate": round(speeds["alone"] / speeds["transformers_generate"], 3),
        },
        "measured_vs_predicted": {name: round(speeds[name] / expected, 3) for name, expected in predicted.items()},
        "lockstep_pair": locked.mode.name,
        "async_pair": pair.mode.name,
        "tokens_per_full_pass": round(three.tokens_per_full_pass, 3),
        "full_passes_by_drafter": {edge.drafter or "none": edge.passes for edge in top},
        "accepted_share": round(sum(edge.accepted for edge in top) / max(1, sum(edge.proposed for edge in top)), 3),
        "mean_wait_before_a_full_pass_ms": round(sum(edge.waited_s for edge in top) / passes * 1e3, 2),
        "first_token_ms": round(statistics.median(three.first_token_s) * 1e3, 1),
        "same_text": all(result.texts == alone.texts for result in results),
        **measured_costs(costs),
        "full_parameters": parameters,
        "full_dtype": FULL_DTYPE,
        "max_tokens": MAX_TOKENS,
        "hardware": f"{processor()}, {os.cpu_count()} cores",
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cascade.json").write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
