"""What is compared, and the cascades that serve it: one for each drafter that reads a model, for that has one such."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.turns import AGAIN, ALONE, AUTO
from cascade import family
from cascade.answer import Completion
from cascade.bench.measure import Mode
from cascade.drafters import EXIT, TEXT, DrafterSpec
from cascade.local import Cascade
from cascade.params import Handling, SamplingParams, Speculation

LOWER = family.NAMES[:-1]
FIRST = LOWER[0]
INSIDE = tuple(kind for kind in TEXT if kind != "corpus")  # which needs a user's own texts
HEADS = (family.HEAD, EXIT)  # which read the full model
CHAINS = (
    *((kind,) for kind in INSIDE),
    *((kind,) for kind in HEADS),
    *((name,) for name in LOWER),
    LOWER,
    ("suffix", FIRST),
    ("suffix", family.HEAD),
)
NAMED = tuple(Mode(" + ".join(chain), Speculation(tiers=chain)) for chain in CHAINS)
MODES = (ALONE, AGAIN, AUTO, *NAMED)


class Served:
    """Cascades of the family in this process, behind one door."""

    def __init__(self, default: Cascade, plain: Cascade, by_head: dict[str, Cascade]) -> None:
        self._default = default
        self._plain = plain
        self._by_head = by_head

    async def ask(self, ids: list[int], params: SamplingParams, speculation: Speculation, handling: Handling) -> Completion:
        completion = await self._of(speculation).agenerate(ids, params, speculation, handling)
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
    inside = [DrafterSpec(kind) for kind in INSIDE]
    with ExitStack() as stack:
        default = stack.enter_context(Cascade.demo())
        plain = stack.enter_context(Cascade.demo(drafter=inside))
        heads = (DrafterSpec(family.HEAD, family.head()), DrafterSpec(EXIT))
        by_head = {head.kind: stack.enter_context(Cascade.demo(drafter=[*inside, head])) for head in heads}
        yield Served(default, plain, by_head)
