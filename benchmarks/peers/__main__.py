"""This project against Transformers, vLLM and llama.cpp on the same weights, prompts and threads, in float32, in one run.

    make bench-peers

Every engine is a process of its own, stopped while another computes; vLLM and llama.cpp have environments of their own
(``.venv-peers``), made on the first run. All modes take turns: in each round every one answers the same prompts, once, and the
next round begins with another mode, so a slow minute hits all. Medians of the rounds count. A peer that cannot be had or fails
is named under ``missing``. OMP_NUM_THREADS is honoured. The last line is one JSON document.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import reference
from benchmarks.peers import crew, environments, report
from benchmarks.peers.contract import MOST_REQUESTS, Said, Setup, Turn, num_threads
from benchmarks.peers.prompts import PROMPTS
from benchmarks.peers.report import Cell
from cascade import family
from cascade.engine.devices import processor
from cascade.engine.threads import apart
from cascade.engine.tokenizer import Tokenizer

WORK = Path(__file__).parents[1] / ".work"
RESULTS = Path(__file__).parents[1] / "results"
TOKENS = {"embedded": 128, "grown": 64}  # of an answer
TEMPERATURES = (0.0, 0.8)
BATCH_ROUNDS = 4  # of eight requests at once
WARM_UP = 32  # tokens
CREW = (  # engine, modes that one worker has loaded, its environment
    ("ours", ("cascade_alone", "cascade_auto"), None),
    ("ours", ("cascade_drafter",), None),
    ("huggingface", ("generate", "generate_assisted", "generate_lookup"), None),
    ("vllm_cpu", ("vllm_alone",), environments.VLLM),
    ("vllm_cpu", ("vllm_ngram",), environments.VLLM),
    ("vllm_cpu", ("vllm_draft",), environments.VLLM),
    ("llama_cpp_python", ("llama_alone", "llama_draft"), environments.LLAMA),
)
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    prompts: Sequence[Sequence[int]]
    tokens: int
    engines: Sequence[str]

    def rounds(self, cell: Cell) -> int:
        """Every prompt alone; of eight at once, each of sixteen prompts twice."""
        return len(self.prompts) if cell.requests == 1 else max(1, BATCH_ROUNDS * len(self.prompts) // len(PROMPTS))

    def turn(self, mode: str, cell: Cell, number: int) -> Turn:
        """What ``mode`` is asked in a round: prompts follow each other from round to round."""
        places = [(number * cell.requests + i) % len(self.prompts) for i in range(cell.requests)]
        prompts = [self.prompts[place] for place in places]
        return Turn(mode, prompts, [place + 1 for place in places], cell.temperature, self.tokens)


@cache
def interpreter(environment: environments.Environment | None) -> tuple[str, ...]:
    """The command that runs Python. Raises `environments.Missing`."""
    if environment is None:
        return (sys.executable,)
    if not environment.is_there:
        console.print(f"making the environment of {environment.name}, which takes minutes")
    return (str(environment.python()),)


def settings(environment: environments.Environment | None, work: Path) -> dict[str, str]:
    """Variables of a worker: the same threads and large pages for all, and what vLLM's documentation asks for."""
    common = {
        "OMP_NUM_THREADS": str(num_threads()),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if environment is not environments.VLLM:
        return common
    openmp = environment.folder / "lib" / "libiomp5.so"
    return common | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as all others: a thread on a core of its own waits for who else is there
        "KMP_BLOCKTIME": "5",  # milliseconds; as vLLM sets it for threads that it binds
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CACHE_ROOT": str(work / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": str(openmp) if openmp.exists() else "",
    }


class Run:
    """All workers of one model, what they said, and who is missing."""

    def __init__(self, models: Sequence[str], plan: Plan, stack: ExitStack) -> None:
        self._plan = plan
        self.workers: dict[str, crew.Worker] = {}  # by mode
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        WORK.mkdir(exist_ok=True)
        for engine, modes, environment in CREW:
            if engine in plan.engines:
                self._hire(Setup(engine, modes, tuple(models), str(WORK)), environment, stack)

    def _hire(self, setup: Setup, environment: environments.Environment | None, stack: ExitStack) -> None:
        begin = time.perf_counter()
        try:
            worker = stack.enter_context(crew.Worker(setup, interpreter(environment), settings(environment, WORK)))
        except (environments.Missing, crew.WorkerFailed) as error:
            self.missing |= dict.fromkeys(setup.modes, str(error))
        else:
            self.workers |= dict.fromkeys(setup.modes, worker)
            self.versions |= worker.versions
        console.print(f"{', '.join(setup.modes)}: {time.perf_counter() - begin:.0f} s to load")

    def measure(self, cell: Cell) -> dict[str, list[Said]]:
        """Rounds of turns, after one short turn of everyone that does not count."""
        for mode in list(self.workers):
            turn = self._plan.turn(mode, cell, 0)
            self._ask(Turn(mode, turn.prompts, turn.seeds, turn.temperature, min(WARM_UP, turn.tokens)))
        said: dict[str, list[Said]] = {mode: [] for mode in self.workers}
        for number in range(self._plan.rounds(cell)):
            modes = list(self.workers)
            first = number % max(1, len(modes))
            for mode in modes[first:] + modes[:first]:
                if (found := self._ask(self._plan.turn(mode, cell, number))) is not None:
                    said[mode].append(found)
        return {mode: turns for mode, turns in said.items() if mode in self.workers}

    def _ask(self, turn: Turn) -> Said | None:
        """A mode that fails is asked no more."""
        try:
            said = self.workers[turn.mode].ask(turn)
            if any(len(text) != turn.tokens for text in said.token_ids):
                raise crew.WorkerFailed(f"texts of {[len(text) for text in said.token_ids]} tokens, not of {turn.tokens}")
            return said
        except crew.WorkerFailed as error:
            self.missing[turn.mode] = str(error)
            del self.workers[turn.mode]
            return None

    def computed_s(self) -> float:
        """Seconds of the processors, of all workers and this process."""
        return time.process_time() + sum(worker.processor_s() for worker in set(self.workers.values()))


def busy_s() -> tuple[float, float]:
    """Seconds of all processors, altogether and in use."""
    times = [int(part) / os.sysconf("SC_CLK_TCK") for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(times), sum(times) - times[3] - times[4]


def compare(name: str, models: Sequence[str], plan: Plan) -> tuple[dict[str, Any], Run]:
    """Figures of one model."""
    with ExitStack() as stack:
        run = Run(models, plan, stack)
        (whole, used), own = busy_s(), run.computed_s()
        cells: dict[Cell, Mapping[str, Sequence[Said]]] = {}
        for requests in (1, MOST_REQUESTS):
            for temperature in TEMPERATURES:
                begin = time.perf_counter()
                cells[Cell(temperature, requests)] = run.measure(Cell(temperature, requests))
                console.print(f"{name}, temperature {temperature}, {requests} at once: {time.perf_counter() - begin:.0f} s")
        whole, used, own = busy_s()[0] - whole, busy_s()[1] - used, run.computed_s() - own
    left = {cell: {mode: said for mode, said in turns.items() if mode in run.workers} for cell, turns in cells.items()}
    taken = {"taken_by_others": round(max(0.0, used - own) / whole, 3)}  # of all processors
    return report.figures(left) | {"tokens": plan.tokens} | taken, run


def families(names: Sequence[str]) -> dict[str, list[str]]:
    """Folders of models, bottom to top."""
    grown = WORK / "full-200m"
    if "grown" in names:
        apart(lambda: reference.grow_full(grown))
    known = {"embedded": family.paths(), "grown": [*family.paths()[:-1], str(grown)]}
    return {name: known[name] for name in names}


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="This project against other engines.")
    engines = tuple(dict.fromkeys(engine for engine, _, _ in CREW))
    parser.add_argument("--models", nargs="+", choices=TOKENS, default=list(TOKENS))
    parser.add_argument("--engines", nargs="+", choices=engines, default=engines)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="so many of the prompts (%(default)s)")
    parser.add_argument("--tokens", type=int, help="of an answer (128 of the embedded model, 64 of the grown one)")
    parser.add_argument("--results", type=Path, default=RESULTS / "peers.json", help="where the document is kept")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench-peers was told to end"))  # and ends its workers
    tokenizer = Tokenizer.from_pretrained(family.paths()[-1])
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS[: chosen.prompts]]
    models: dict[str, dict[str, Any]] = {}
    about: dict[str, Any] = {"missing": {}, "versions": {}, "threads": num_threads(), "prompts": len(prompts)}
    about |= {"dtype": "float32", "hardware": f"{processor()}, {os.cpu_count()} cores"}
    for name, folders in families(chosen.models).items():
        plan = Plan(prompts, chosen.tokens or TOKENS[name], chosen.engines)
        models[name], run = compare(name, folders, plan)
        about["missing"] |= {f"{name} {mode}": reason for mode, reason in run.missing.items()}
        about["versions"] |= run.versions
        console.print(report.table(name, models[name]))
        chosen.results.parent.mkdir(exist_ok=True)
        chosen.results.write_text(json.dumps(report.document(models, about), indent=2) + "\n")
    print(json.dumps(report.document(models, about)))
    if not all(found["cascade_lossless"] for found in models.values()):
        raise SystemExit("The cascade's text is not that of its full model alone")


if __name__ == "__main__":
    main()
