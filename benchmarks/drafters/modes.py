"""What is compared, and the cascades that serve it: one for each drafter that reads a model, for that has one such."""

import argparse
import inspect
import json
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cascade import family
from cascade.answer import Chunk, Completion
from cascade.bench.measure import Mode
from cascade.drafters import EXIT, KINDS, DrafterSpec
from cascade.local import Cascade
from cascade.params import Handling, SamplingParams, Speculation

WORK = Path(__file__).parents[1] / ".work"
LOWER = family.NAMES[:-1]
FIRST = LOWER[0]
HEADS = (DrafterSpec(family.HEAD, family.head()), DrafterSpec(EXIT))  # of the embedded family
INSIDE = (*KINDS, *(one.kind for one in HEADS))
ALONE, AUTO = Mode("alone", Speculation("off")), Mode("auto", Speculation())
CHAINS = (
    *((kind,) for kind in INSIDE),
    *((kind, FIRST) for kind in INSIDE),
    *((name,) for name in LOWER),
    LOWER,
    ("suffix", *LOWER),
    ("suffix", family.HEAD),
)
NAMED = tuple(Mode(" + ".join(chain), Speculation(tiers=chain)) for chain in CHAINS)
MODES = (ALONE, AUTO, *NAMED)


def corpus() -> DrafterSpec:
    """Modules of the standard library, as a file."""
    WORK.mkdir(exist_ok=True)
    path = WORK / "corpus.txt"
    path.write_text("\n".join(map(inspect.getsource, (argparse, textwrap, inspect, json))), encoding="utf-8")
    return DrafterSpec("corpus", str(path))


class Served:
    """Cascades of the embedded family in this process, behind one door."""

    def __init__(self, default: Cascade, plain: Cascade, by_head: dict[str, Cascade]) -> None:
        self._default = default
        self._plain = plain
        self._by_head = by_head

    def stream(self, prompt: str, params: SamplingParams, speculation: Speculation, handling: Handling) -> AsyncIterator[Chunk]:
        return self._of(speculation).astream(prompt, params, speculation, handling)

    async def ask(self, prompt: str, params: SamplingParams, speculation: Speculation, handling: Handling) -> Completion:
        completion = await self._of(speculation).agenerate(prompt, params, speculation, handling)
        assert isinstance(completion, Completion)
        return completion

    def _of(self, speculation: Speculation) -> Cascade:
        """None has a drafter that reads the model where that is not asked for: the full model alone is to be at its best."""
        if speculation in (ALONE.speculation, AUTO.speculation):
            return self._default
        return next((self._by_head[kind] for kind in speculation.tiers or () if kind in self._by_head), self._plain)


@contextmanager
def served() -> Iterator[Served]:
    """One with what is on if nobody says anything, one with all that needs no model, and one for each head beside that."""
    inside = [corpus() if kind == "corpus" else DrafterSpec(kind) for kind in KINDS]
    with ExitStack() as stack:
        default = stack.enter_context(Cascade.demo())
        plain = stack.enter_context(Cascade.demo(drafter=inside))
        by_head = {head.kind: stack.enter_context(Cascade.demo(drafter=[*inside, head])) for head in HEADS}
        yield Served(default, plain, by_head)
