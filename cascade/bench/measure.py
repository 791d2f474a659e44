"""How fast a server or a cascade in this process answers one request at a time, mode beside mode in one run.

Modes take turns on every prompt, so that whatever else the machine does meanwhile slows all of them alike. Each request is a
tenant of its own: no mode knows the prompt or the text from another one.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cascade.answer import Chunk, Completion
from cascade.bench.prompts import BUILT_IN
from cascade.messages import Edge
from cascade.params import Handling, SamplingParams, Speculation

Stream = Callable[[str, SamplingParams, Speculation, Handling], Iterator[Chunk]]

PROMPTS = tuple({prompt.category: prompt.text for prompt in reversed(BUILT_IN)}.values())[::-1]
"""The first prompt of each kind that ships."""
WARM_TOKENS = 16  # output tokens at most of the request that warms a mode up


def stranger() -> Handling:
    """A request that nothing is known of: no keys and values of its prompt, and no texts like its own."""
    return Handling(cache_salt=uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to serve a request."""

    name: str
    speculation: Speculation


class EdgeTotals(dict[tuple[str, str], Edge]):
    """What happened on each edge in all requests, by drafter and verifier."""

    def add(self, edges: Iterable[Edge]) -> None:
        """Count the edges of a request, or of other totals."""
        for edge in edges:
            key = (edge.drafter, edge.verifier)
            self[key] = self[key] + edge if key in self else edge

    @property
    def full_passes(self) -> int:
        """Passes of the full tier, each counted once for every request in it."""
        full = next(iter(self.values())).verifier if self else ""  # a request's first edges are the full tier's
        return sum(edge.passes for edge in self.values() if edge.verifier == full)


@dataclass(slots=True)
class Measured:
    """Totals of one mode over all prompts."""

    mode: Mode
    tokens: int = 0
    seconds: float = 0.0  # from sending a request to its last token, summed
    first_token_s: list[float] = field(default_factory=list)  # from sending each request, seconds
    texts: list[tuple[int, ...]] = field(default_factory=list)  # token ids, to compare modes
    edges: EdgeTotals = field(default_factory=EdgeTotals)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_full_pass(self) -> float:
        passes = self.edges.full_passes
        return self.tokens / passes if passes else 0.0

    def add(self, completion: Completion, seconds: float, first_token_s: float) -> None:
        """Count one finished request."""
        self.tokens += completion.stats.completion_tokens
        self.seconds += seconds
        self.first_token_s.append(first_token_s)
        self.texts.append(completion.token_ids)
        self.edges.add(completion.stats.edges)

    def merge(self, other: "Measured") -> None:
        """Count what was measured in another run of the same mode."""
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.first_token_s += other.first_token_s
        self.texts += other.texts
        self.edges.add(other.edges.values())


def measure(
    stream: Stream,
    modes: Sequence[Mode],
    params: SamplingParams,
    *,
    prompts: Sequence[str] = PROMPTS,
    rounds: int = 1,
    step: Callable[[], object] = lambda: None,
) -> list[Measured]:
    """Serve every prompt in every mode ``rounds`` times, after one short request in each mode to warm up.

    ``step`` is called after each request that counts.
    """
    results = [Measured(mode) for mode in modes]
    short = replace(params, max_tokens=min(params.max_tokens, WARM_TOKENS), min_tokens=min(params.min_tokens, WARM_TOKENS))
    for mode in modes:
        _time(stream, prompts[0], short, mode)
    for _ in range(rounds):
        for prompt in prompts:
            for result in results:
                result.add(*_time(stream, prompt, params, result.mode))
                step()
    return results


def _time(stream: Stream, prompt: str, params: SamplingParams, mode: Mode) -> tuple[Completion, float, float]:
    begin = time.perf_counter()
    first_token_s = 0.0
    completion = None
    for chunk in stream(prompt, params, mode.speculation, stranger()):
        first_token_s = first_token_s or time.perf_counter() - begin
        completion = chunk.completion or completion
    assert completion is not None, "a stream ends with its completion"
    return completion, time.perf_counter() - begin, first_token_s
