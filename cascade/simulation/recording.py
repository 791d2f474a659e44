"""Own tokens of real tiers along texts of the full one, and tiers that repeat them without the models.

A text is recorded once: the full model writes it, and each tier below gives its own token and runner-ups at each position.
After a wrong guess, where nothing was recorded, tiers agree at random as often as along the texts, like `ToyTier`. Those tokens
are thrown away, so the text does not depend on them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from cascade.errors import ConfigError
from cascade.params import SamplingParams
from cascade.scorer import RunnerUp
from cascade.simulation.toy_tier import Agreement, ToyTier

ORDER = 24  # a position and so many tokens before it identify a place, so no two texts may share both

Ranked: TypeAlias = tuple[RunnerUp, ...]  # an own token and its runner-ups
Place: TypeAlias = tuple[int, tuple[int, ...]]  # a position, and the last tokens before it


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A prompt, and own tokens with runner-ups after it: ``ranked[tier][position]``, tiers bottom to top.

    The last tier's own tokens are the text.
    """

    prompt: tuple[int, ...]
    ranked: tuple[tuple[Ranked, ...], ...]
    category: str = ""

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(at[0].token for at in self.ranked[-1])


@dataclass(frozen=True, slots=True)
class Recording:
    """One or more texts of the same tiers."""

    texts: tuple[RecordedText, ...]

    @property
    def num_tiers(self) -> int:
        return len(self.texts[0].ranked)

    @property
    def agreement(self) -> Agreement:
        """How often the own token of each tier equals that of the next one, bottom to top."""
        return tuple(self.shared(lower, lower + 1) for lower in range(self.num_tiers - 1))

    def shared(self, lower: int, upper: int, most: int = 1) -> float:
        """Share of positions at which the own token of tier ``upper`` is among the ``most`` likeliest of tier ``lower``."""
        pairs = [pair for text in self.texts for pair in zip(text.ranked[lower], text.ranked[upper], strict=True)]
        return sum(above[0].token in {near.token for near in below[:most]} for below, above in pairs) / len(pairs)

    def places(self, tier: int) -> dict[Place, Ranked]:
        """Own tokens of a tier by place; raises `ConfigError` if two texts differ at the same place."""
        places: dict[Place, Ranked] = {}
        for text in self.texts:
            whole = (*text.prompt, *text.output)
            for position, ranked in enumerate(text.ranked[tier], len(text.prompt)):
                place = (position, whole[max(0, position - ORDER) : position])
                if places.setdefault(place, ranked) != ranked:
                    raise ConfigError(f"Two recorded texts have the same {ORDER} tokens before position {position}: drop one")
        return places

    def save(self, path: Path) -> None:
        """Write JSON; raises `OSError`."""
        texts = [{"category": text.category, "prompt": text.prompt, "said": text.ranked} for text in self.texts]
        path.write_text(json.dumps({"texts": texts}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; raises `ConfigError`."""
        try:
            read = cls(tuple(map(_text, json.loads(path.read_text(encoding="utf-8"))["texts"])))
            read.agreement  # noqa: B018  # finds out whether there are texts, all of the same tiers
            return read
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
            raise ConfigError(f"The recording {str(path)!r} cannot be read ({error}): record the tiers again") from None


def _text(value: Mapping[str, Any]) -> RecordedText:
    ranked = tuple(tuple(tuple(RunnerUp(*pair) for pair in at) for at in tier) for tier in value["said"])
    return RecordedText(tuple(value["prompt"]), ranked, value["category"])


class RecordedTier(ToyTier):
    """A tier that gives recorded own tokens, at temperature 0, and is a toy where nothing was recorded.

    ``agreement`` is that of `ToyTier`; its length identifies the tier, since the full one has none.
    """

    def __init__(self, vocab_size: int, agreement: Agreement, recording: Recording, **limits: int) -> None:
        super().__init__(vocab_size, agreement, order=ORDER, **limits)
        self._places = recording.places(recording.num_tiers - 1 - len(agreement))

    def ranked(self, context: tuple[int, ...], position: int, params: SamplingParams, count: int) -> list[RunnerUp]:
        if params.temperature == 0 and (ranked := self._places.get((position, context))) is not None:
            return list(ranked[:count])
        return super().ranked(context, position, params, count)
