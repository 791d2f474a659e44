"""What real tiers say along texts that the full one wrote, and tiers that say it again without their models.

A text is recorded once: the full model writes it, and each tier below is asked at each of its positions for its own token and
runner-ups. Guesses that are wrong are thrown away, so nothing else of a tier ever reaches a text. After a wrong token, where
nothing was recorded, tiers agree by chance as often as along the texts, as `ToyTier` has it.
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

SEEN = 24  # tokens before a position by which a text is known; together with the position they are one text's alone

Said: TypeAlias = tuple[RunnerUp, ...]  # an own token and its runner-ups
Place: TypeAlias = tuple[int, tuple[int, ...]]  # a position, and the last tokens before it


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A prompt, and what each tier, bottom to top, says at each position after it: ``said[tier][position]``.

    The last tier's own tokens are the text.
    """

    prompt: tuple[int, ...]
    said: tuple[tuple[Said, ...], ...]
    category: str = ""

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(at[0].token for at in self.said[-1])


@dataclass(frozen=True, slots=True)
class Recording:
    """Texts of the same tiers, at least one."""

    texts: tuple[RecordedText, ...]

    @property
    def agreement(self) -> Agreement:
        """Share of own tokens that each tier has in common with the next, bottom to top."""
        tiers = range(len(self.texts[0].said))
        return tuple(self.shared(lower, lower + 1) for lower in tiers[:-1])

    def shared(self, one: int, other: int, most: int = 1) -> float:
        """Share of positions where a tier's own token is among the ``most`` likeliest of another below it, ``one``."""
        pairs = [pair for text in self.texts for pair in zip(text.said[one], text.said[other], strict=True)]
        return sum(above[0].token in {near.token for near in below[:most]} for below, above in pairs) / len(pairs)

    def known(self, tier: int) -> dict[Place, Said]:
        """What a tier says, by place; raises `ConfigError` if two texts say different things at the same place."""
        found: dict[Place, Said] = {}
        for text in self.texts:
            whole = (*text.prompt, *text.output)
            for position, said in enumerate(text.said[tier], len(text.prompt)):
                place = (position, whole[max(0, position - SEEN) : position])
                if found.setdefault(place, said) != said:
                    raise ConfigError(f"Two recorded texts have the same {SEEN} tokens before position {position}: drop one")
        return found

    def save(self, path: Path) -> None:
        """Write JSON; raises `OSError`."""
        texts = [{"category": one.category, "prompt": one.prompt, "said": one.said} for one in self.texts]
        path.write_text(json.dumps({"texts": texts}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; raises `ConfigError`."""
        try:
            return cls(tuple(map(_text, json.loads(path.read_text(encoding="utf-8"))["texts"])))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"The recording {str(path)!r} cannot be read ({error}): record the tiers again") from None


def _text(value: Mapping[str, Any]) -> RecordedText:
    said = tuple(tuple(tuple(RunnerUp(*one) for one in at) for at in tier) for tier in value["said"])
    return RecordedText(tuple(value["prompt"]), said, value["category"])


class RecordedTier(ToyTier):
    """A tier that says what was recorded of it, at temperature 0, and is a toy everywhere else.

    ``agreement`` is `ToyTier`'s, and tells which tier it is: the full one has none.
    """

    def __init__(self, vocab_size: int, agreement: Agreement, recording: Recording, **limits: int) -> None:
        super().__init__(vocab_size, agreement, order=SEEN, **limits)
        self._known = recording.known(len(recording.texts[0].said) - 1 - len(agreement))

    def ranked(self, context: tuple[int, ...], position: int, params: SamplingParams, count: int) -> list[RunnerUp]:
        if params.temperature == 0 and (said := self._known.get((position, context))) is not None:
            return list(said[:count])
        return super().ranked(context, position, params, count)


def fake(vocab_size: int, agreement: Agreement, recording: str | None = None, **limits: int) -> ToyTier:
    """The model of an emulated device that has none: of a file that holds a recording, or a toy; raises `ConfigError`."""
    if recording is None:
        return ToyTier(vocab_size, agreement, **limits)
    return RecordedTier(vocab_size, agreement, Recording.load(Path(recording)), **limits)
