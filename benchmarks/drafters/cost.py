"""What guesses without a model cost: time a token, and memory a position."""

import random
import time
from statistics import median
from typing import Any

from cascade.draft import NO_DRAFT
from cascade.drafters import DrafterSpec, make
from cascade.drafters.matching import Matcher
from cascade.scorer import Scored

CONTEXT = 8192  # tokens of the text
TOKENS = 2000  # that are guessed after it, one after another
MOST = 16  # of a guess
WORDS = 500  # of the vocabulary: few, so that there is much to find
KINDS = ("lookup", "suffix", "recycling", "lookahead")


def measure(kind: str) -> dict[str, Any]:
    """Microseconds a token, and bytes a position of the text."""
    [drafter] = make([DrafterSpec(kind)], [kind], None)
    guesser, chance = drafter.begin(""), random.Random(1)
    text = [chance.randrange(WORDS) for _ in range(CONTEXT)]
    guesser.guess(text, 0, MOST)
    times: list[float] = []
    for _ in range(TOKENS):
        last = text[-1]
        text.append(chance.randrange(WORDS))
        begin = time.perf_counter()
        guesser.saw(last, NO_DRAFT, Scored(text[-1:]))
        guesser.guess(text, len(text) - 1, MOST)
        times.append(time.perf_counter() - begin)
    held = guesser.own.nbytes / len(text) if isinstance(guesser, Matcher) else None
    return {"us_a_token": round(median(times) * 1e6, 1), "bytes_a_position": None if held is None else round(held, 1)}


def costs() -> dict[str, Any]:
    """Of each kind."""
    return {kind: measure(kind) for kind in KINDS}
