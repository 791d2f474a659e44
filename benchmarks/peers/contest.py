"""One request at a time: all modes of all engines answer the same prompts in turns."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.document import console
from benchmarks.peers import crew, environments, report
from benchmarks.peers.contract import BFLOAT16, FLOAT32, Models, Said, Setup, Turn, num_threads
from benchmarks.peers.engines import ours
from benchmarks.turns import at, rotated

WORK = Path(__file__).parents[1] / ".work"
WARM_UP = 32  # tokens
LOADING = 2  # engines of others that load at once
LEAST = 2  # rounds at a temperature
FIRST_WEIGHT = 2.0  # of the first temperature, which has all modes, in sharing out the time


@dataclass(frozen=True, slots=True)
class Post:
    """A worker: its engine, the modes that it has loaded, and how."""

    engine: str
    modes: tuple[str, ...]
    environment: environments.Environment | None = None
    dtype: str = FLOAT32


def _llama(suffix: str, dtype: str) -> Post:
    ways = ("alone", "lookup", "draft")
    return Post("llama_cpp_python", tuple(f"llama_{way}{suffix}" for way in ways), environments.LLAMA, dtype)


POSTS = (
    Post("huggingface", ("generate", "generate_lookup", "generate_assisted")),
    Post("vllm_cpu", ("vllm_alone",), environments.VLLM),
    Post("vllm_cpu", ("vllm_ngram",), environments.VLLM),
    Post("vllm_cpu", ("vllm_suffix",), environments.VLLM),
    Post("vllm_cpu", ("vllm_draft",), environments.VLLM),
    _llama("", FLOAT32),
    _llama("_bf16", BFLOAT16),
    Post("ours", tuple(ours.MODES)),
    Post("ours", ("cascade_alone_bf16", "cascade_auto_bf16"), dtype=BFLOAT16),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    prompts: Sequence[Sequence[int]]  # token ids
    tokens: int  # of an answer at most
    temperatures: Sequence[float]  # ascending
    seconds: float  # after which no round begins, but for the first `LEAST` of a temperature


def settings(environment: environments.Environment | None) -> dict[str, str]:
    """Variables of a process: the same threads and large pages for all, and what an engine's documentation asks for."""
    common = {
        "OMP_NUM_THREADS": str(num_threads()),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(WORK / "vllm")),
    }
    return common if environment is None else {**common, **environment.variables}


@dataclass(slots=True)
class Crew:
    """All workers that could be loaded, and who is missing, for which reason."""

    workers: dict[str, crew.Worker] = field(default_factory=dict)  # by mode
    missing: dict[str, str] = field(default_factory=dict)  # by mode
    versions: dict[str, str] = field(default_factory=dict)

    def hire(self, posts: Sequence[Post], models: Models, end_ids: Sequence[int], stack: ExitStack) -> None:
        """Load them; those of this project by itself, for it takes the price of a pass meanwhile."""
        started: list[crew.Worker] = []

        def close() -> None:
            for worker in started:
                worker.part()
            for worker in started:
                worker.close()

        def load(post: Post) -> None:
            setup = Setup(post.engine, post.modes, models, post.dtype, tuple(end_ids), str(WORK))
            begin, worker = time.perf_counter(), None
            try:
                python = sys.executable if post.environment is None else post.environment.python
                worker = crew.Worker(setup, python, settings(post.environment))
                started.append(worker)
                worker.load()
            except (environments.Missing, crew.WorkerFailed) as error:
                self.missing |= dict.fromkeys(post.modes, str(error))
                console.print(f"{', '.join(post.modes)}: missing: {error}")
                if worker is not None:
                    worker.close()
                return
            self.workers |= dict.fromkeys(post.modes, worker)
            self.versions |= worker.versions
            console.print(f"{', '.join(post.modes)}: loaded in {time.perf_counter() - begin:.0f} s")

        stack.callback(close)
        with ThreadPoolExecutor(LOADING) as pool:
            try:
                list(pool.map(load, [post for post in posts if post.engine != "ours"]))
            except BaseException:
                close()  # so that nobody waits for them
                raise
        for post in posts:
            if post.engine == "ours":
                load(post)

    def ask(self, turn: Turn) -> Said | None:
        """A mode that fails is asked no more."""
        try:
            answer = self.workers[turn.mode].ask(turn)
            if not 0 < len(answer.token_ids) <= turn.tokens:
                raise crew.WorkerFailed(f"an answer of {len(answer.token_ids)} tokens, of {turn.tokens} at most")
            return answer
        except crew.WorkerFailed as error:
            self.missing[turn.mode] = str(error)
            del self.workers[turn.mode]
            console.print(f"{turn.mode}: failed: {error}")
            return None


def measure(crew_: Crew, plan: Plan, tell: Callable[[str, report.Turns], None]) -> dict[str, report.Turns]:
    """Turns of each mode by temperature; ``tell`` hears of each temperature when it is done.

    A drafted mode that is slower than its engine alone at the first temperature is not asked again at higher ones, where
    fewer guesses are right.
    """
    for mode in list(crew_.workers):
        crew_.ask(Turn(mode, plan.prompts[0], 0, 0.0, min(WARM_UP, plan.tokens)))
    end = time.monotonic() + plan.seconds
    results: dict[str, report.Turns] = {}
    for temperature in sorted(plan.temperatures):
        modes = list(crew_.workers)
        if results:
            paying = report.paying(next(iter(results.values())))
            modes = [mode for mode in modes if mode in paying]
        name = at(temperature)
        weights = len(plan.temperatures) - len(results) + (0 if results else FIRST_WEIGHT - 1)
        share = (end - time.monotonic()) * (1 if results else FIRST_WEIGHT) / weights
        results[name] = _in_turns(crew_, plan, temperature, modes, time.monotonic() + share)
        tell(name, results[name])
    return results


def _in_turns(crew_: Crew, plan: Plan, temperature: float, modes: Sequence[str], end: float) -> report.Turns:
    """In a round every mode answers the same prompt, and the next round begins with another mode."""
    answers: dict[str, list[Said]] = {mode: [] for mode in modes}
    for number, prompt in enumerate(plan.prompts):
        if number >= LEAST and time.monotonic() >= end:
            break
        for mode in rotated(modes, number):
            if mode in crew_.workers and (answer := crew_.ask(Turn(mode, prompt, number + 1, temperature, plan.tokens))):
                answers[mode].append(answer)
    return {mode: turns for mode, turns in answers.items() if mode in crew_.workers}
