"""llama.cpp: alone through its batches of several requests, and with a draft model through llama-cpp-python's own loop.

That loop takes one request at a time, and keeps a guess where it is what the full model chooses, at any temperature.
"""

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama

from benchmarks.peers.contract import MOST_REQUESTS, NUM_DRAFTED, POSITIONS, Said, Setup, Turn, num_threads
from benchmarks.peers.gguf_file import converted

F32 = 0  # of keys and values, in llama.cpp's list of types


class Context:
    """A model and its keys and values, behind llama.cpp's C functions."""

    def __init__(self, path: Path, sequences: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = POSITIONS * sequences, POSITIONS * sequences, sequences
        params.n_threads = params.n_threads_batch = num_threads()
        params.type_k = params.type_v = F32
        self.pointer = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self._batch = llama_cpp.llama_batch_init(POSITIONS * sequences, 0, 1)

    def forget(self, start: int = 0) -> None:
        """Drop keys and values of all sequences from position ``start`` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, -1, start, -1)

    def run(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> list[int]:
        """Score rows of (sequence, first position, tokens); where in the batch the last token of each is."""
        at, last = 0, []
        for sequence, start, tokens in rows:
            for offset, token in enumerate(tokens):
                self._batch.token[at], self._batch.pos[at] = token, start + offset
                self._batch.n_seq_id[at], self._batch.seq_id[at][0] = 1, sequence
                self._batch.logits[at] = offset == len(tokens) - 1
                at += 1
            last.append(at - 1)
        self._batch.n_tokens = at
        if status := llama_cpp.llama_decode(self.pointer, self._batch):
            raise RuntimeError(f"llama_decode ended with {status}")
        return last


def sampler(temperature: float, seed: int) -> Any:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    if temperature:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(temperature))
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(seed))
    else:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
    return chain


class Drafter:
    """A `LlamaDraftModel`: the tiny model's own text, a few tokens at a time."""

    def __init__(self, path: Path) -> None:
        self._context = Context(path, 1)
        self._greedy = sampler(0.0, 0)
        self._known: list[int] = []

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **options: Any) -> npt.NDArray[np.intc]:
        text: list[int] = input_ids.tolist()
        same = min(self._shared(text), len(text) - 1)  # the last token is scored again, for its logits
        self._context.forget(same)
        guesses: list[int] = []
        rest = text[same:]
        for _ in range(NUM_DRAFTED):
            (last,) = self._context.run([(0, same, rest)])
            guesses.append(llama_cpp.llama_sampler_sample(self._greedy, self._context.pointer, last))
            same, rest = same + len(rest), guesses[-1:]
        self._known = text + guesses[:-1]
        return np.array(guesses, dtype=np.intc)

    def _shared(self, text: list[int]) -> int:
        """Tokens at the beginning that are known."""
        pairs = enumerate(zip(text, self._known, strict=False))
        return next((at for at, (new, old) in pairs if new != old), min(len(text), len(self._known)))


class LlamaCpp:
    """Both ways to ask the full model; its file is mapped, so it is in memory once."""

    def __init__(self, setup: Setup) -> None:
        llama_cpp.llama_backend_init()
        full, tiny = (converted(Path(model), Path(setup.work)) for model in (setup.models[-1], setup.models[0]))
        self._alone = Context(full, MOST_REQUESTS)
        threads = {"n_threads": num_threads(), "n_threads_batch": num_threads()}
        options: dict[str, Any] = {"n_ctx": POSITIONS, "type_k": F32, "type_v": F32, "verbose": False, **threads}
        self._drafted = Llama(str(full), draft_model=Drafter(tiny), **options)
        self.versions = {"llama-cpp-python": llama_cpp.__version__, "llama.cpp": self._instructions()}

    def _instructions(self) -> str:
        said: bytes = llama_cpp.llama_print_system_info()
        return said.decode().strip()

    def generate(self, turn: Turn) -> Said:
        begin = time.perf_counter()
        said = self._together(turn) if turn.mode == "llama_alone" else self._one_by_one(turn)
        return Said(time.perf_counter() - begin, said)

    def _together(self, turn: Turn) -> list[list[int]]:
        """All requests in one batch, as llama.cpp's server has them."""
        self._alone.forget()
        samplers = [sampler(turn.temperature, seed) for seed in turn.seeds]
        said: list[list[int]] = [[] for _ in turn.prompts]
        rows: list[tuple[int, int, Sequence[int]]] = [(index, 0, prompt) for index, prompt in enumerate(turn.prompts)]
        for _ in range(turn.tokens):
            for (index, _, _), last in zip(rows, self._alone.run(rows), strict=True):
                said[index].append(llama_cpp.llama_sampler_sample(samplers[index], self._alone.pointer, last))
            rows = [(index, start + len(tokens), said[index][-1:]) for index, start, tokens in rows]
        for chain in samplers:
            llama_cpp.llama_sampler_free(chain)
        return said

    def _one_by_one(self, turn: Turn) -> list[list[int]]:
        said = []
        for prompt, seed in zip(turn.prompts, turn.seeds, strict=True):
            self._drafted.reset()  # no prompt is known
            self._drafted.set_seed(seed)
            tokens = self._drafted.generate(list(prompt), temp=turn.temperature, top_k=0, top_p=1.0, min_p=0.0)
            said.append(list(islice(tokens, turn.tokens)))
        return said

    def close(self) -> None: ...


def load(setup: Setup) -> LlamaCpp:
    return LlamaCpp(setup)
