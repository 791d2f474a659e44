"""What the benchmark and its workers say to each other: JSON lines. Every environment has what this needs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

POSITIONS = 2048  # of context, of every engine that asks for a number
NUM_DRAFTED = 4  # tokens a round of a draft model, where an engine asks for a number
FLOAT32, BFLOAT16 = "float32", "bfloat16"
AS_PUBLISHED = "as published"  # of a GGUF file: its own numbers


@dataclass(frozen=True, slots=True)
class Models:
    """Models of one family: folders as Transformers saves them, or GGUF files where an engine reads those."""

    full: str
    tiny: str
    medium: str = ""  # "" of a pair


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker loads."""

    engine: str  # a module of `benchmarks.peers.engines`
    modes: tuple[str, ...]  # what it may be asked for
    models: Models
    dtype: str  # of weights and products
    end_ids: tuple[int, ...]  # tokens that end an answer
    work: str  # folder for what is made on the way


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the answer ends where the model ends it, or after ``tokens``."""

    mode: str
    prompt: Sequence[int]
    seed: int
    temperature: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Said:
    """What a turn took and gave."""

    seconds: float  # from the prompt to the last token
    token_ids: Sequence[int]  # with the token that ended the answer, if one did
    processor_s: float = 0.0  # that all processes of the worker computed meanwhile; the worker does not know


class Engine(Protocol):
    """A loaded engine."""

    versions: Mapping[str, str]

    def generate(self, turn: Turn) -> Said: ...

    def close(self) -> None: ...


def num_threads() -> int:
    """Threads that every engine computes with: ``OMP_NUM_THREADS``, else the cores this process may use."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def parsed_setup(fields: Mapping[str, object]) -> Setup:
    """A setup from its JSON document."""
    given = dict(fields)
    given["models"] = Models(**given["models"])  # type: ignore[arg-type]
    given["modes"], given["end_ids"] = tuple(given["modes"]), tuple(given["end_ids"])  # type: ignore[arg-type]
    return Setup(**given)  # type: ignore[arg-type]


def vllm_drafts(mode: str, tiny: str) -> dict[str, Any] | None:
    """How vLLM, its offline class and its server, is told to draft; ``tiny`` is the folder of the draft model."""
    ngrams = {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    settings: dict[str, dict[str, Any]] = {
        "vllm_ngram": {**ngrams, "num_speculative_tokens": NUM_DRAFTED},
        "vllm_suffix": {"method": "suffix"},
        "vllm_draft": {"method": "draft_model", "model": tiny, "num_speculative_tokens": NUM_DRAFTED},
    }
    return settings.get(mode)
