"""llama.cpp through its C functions: alone, with prompt lookup, and with the tiny model as its draft.

The loop around drafts is that of llama.cpp's ``speculative-simple``: a pass scores the guesses, the sampler chooses after
each, and a guess stays where it is what was chosen.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.peers.contract import AS_PUBLISHED, FLOAT32, NUM_DRAFTED, POSITIONS, Said, Setup, Turn, num_threads
from benchmarks.peers.gguf_file import converted

F32 = 0  # of keys and values, in llama.cpp's list of types
NUM_LOOKED_UP = 2  # tokens, as llama-cpp-python's documentation advises for processors


class Context:
    """A model and its keys and values."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path.name}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = POSITIONS
        params.n_threads = params.n_threads_batch = num_threads()
        if dtype == FLOAT32:
            params.type_k = params.type_v = F32  # else float16, its default
        self.pointer = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self._batch = llama_cpp.llama_batch_init(POSITIONS, 0, 1)

    def forget(self, start: int = 0) -> None:
        """Drop keys and values from position ``start`` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, -1, start, -1)

    def run(self, start: int, tokens: Sequence[int], wanted: int = 1) -> None:
        """Score ``tokens`` from position ``start``, for logits after the last ``wanted`` of them."""
        for at, token in enumerate(tokens):
            self._batch.token[at], self._batch.pos[at] = token, start + at
            self._batch.n_seq_id[at], self._batch.seq_id[at][0] = 1, 0
            self._batch.logits[at] = at >= len(tokens) - wanted
        self._batch.n_tokens = len(tokens)
        if status := llama_cpp.llama_decode(self.pointer, self._batch):
            raise RuntimeError(f"llama_decode ended with {status}")

    def choose(self, chain: Any, at: int) -> int:
        """The token after the one at place ``at`` of the last pass."""
        chosen: int = llama_cpp.llama_sampler_sample(chain, self.pointer, at)
        return chosen


def sampler(temperature: float, seed: int) -> Any:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    if temperature:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(temperature))
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(seed))
    else:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
    return chain


class Drafter(Protocol):
    """What guesses how a text goes on."""

    def __call__(self, text: list[int]) -> list[int]: ...


def nothing(text: list[int]) -> list[int]:
    return []


class Lookup:
    """llama-cpp-python's prompt lookup."""

    def __init__(self) -> None:
        self._decoding = LlamaPromptLookupDecoding(num_pred_tokens=NUM_LOOKED_UP)

    def __call__(self, text: list[int]) -> list[int]:
        tokens: list[int] = self._decoding(np.array(text, dtype=np.intc)).tolist()
        return tokens


class Draft:
    """The tiny model's own text, a few tokens at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._greedy = sampler(0.0, 0)
        self._known: list[int] = []  # with keys and values

    def __call__(self, text: list[int]) -> list[int]:
        same = min(self._shared(text), len(text) - 1)  # the last token is scored again, for its logits
        self._context.forget(same)
        guesses: list[int] = []
        rest = text[same:]
        for _ in range(NUM_DRAFTED):
            self._context.run(same, rest)
            guesses.append(self._context.choose(self._greedy, len(rest) - 1))
            same, rest = same + len(rest), guesses[-1:]
        self._known = text + guesses[:-1]
        return guesses

    def _shared(self, text: list[int]) -> int:
        """Tokens at the beginning that are known."""
        pairs = enumerate(zip(text, self._known, strict=False))
        return next((at for at, (new, old) in pairs if new != old), min(len(text), len(self._known)))


class LlamaCpp:
    """All ways to ask the full model."""

    def __init__(self, setup: Setup) -> None:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_quiet, None)
        full, tiny = (_file(Path(model), setup) for model in (setup.models.full, setup.models.tiny))
        self._full = Context(full, setup.dtype)
        self._end_ids = set(setup.end_ids)
        self._drafters: dict[str, Drafter] = {"alone": nothing, "lookup": Lookup(), "draft": Draft(Context(tiny, setup.dtype))}
        self.versions = {"llama-cpp-python": llama_cpp.__version__, "llama.cpp": self._instructions()}

    def _instructions(self) -> str:
        info: bytes = llama_cpp.llama_print_system_info()
        return info.decode().strip()

    def generate(self, turn: Turn) -> Said:
        draft = self._drafters[turn.mode.split("_")[1]]
        chain = sampler(turn.temperature, turn.seed)
        begin = time.perf_counter()
        token_ids = self._answer(turn, draft, chain)
        seconds = time.perf_counter() - begin
        llama_cpp.llama_sampler_free(chain)
        return Said(seconds, token_ids)

    def _answer(self, turn: Turn, draft: Drafter, chain: Any) -> list[int]:
        prompt, output, num_read = list(turn.prompt), list[int](), 0
        self._full.forget()
        while len(output) < turn.tokens and not self._end_ids & set(output[-1:]):
            text = prompt + output
            rest, guesses = text[num_read:], draft(text)[: turn.tokens - len(output) - 1]
            self._full.run(num_read, rest + guesses, 1 + len(guesses))
            for place, guess in enumerate([*guesses, None], len(rest) - 1):
                output.append(self._full.choose(chain, place))
                if output[-1] != guess or output[-1] in self._end_ids:
                    break
            num_read = len(prompt) + len(output) - 1
            self._full.forget(num_read)
        return output

    def close(self) -> None: ...


def _file(model: Path, setup: Setup) -> Path:
    """The GGUF file of a folder; a file as it is, or with its numbers widened to bfloat16."""
    if model.is_dir():
        return converted(model, setup.dtype, Path(setup.work))
    if setup.dtype == AS_PUBLISHED:
        return model
    target = Path(setup.work) / f"{model.stem}-bfloat16.gguf"
    if not target.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, True, num_threads()
        unfinished = target.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(model).encode(), str(unfinished).encode(), params):
            raise RuntimeError(f"llama.cpp does not widen {model.name}")
        unfinished.replace(target)
    return target


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: Any) -> None: ...


def load(setup: Setup) -> LlamaCpp:
    return LlamaCpp(setup)
