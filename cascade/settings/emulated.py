"""Devices that are not there: fakes, for measuring whole clusters on machines without such devices."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from cascade.settings.section import Section


class EmulatedConfig(Section):
    """A fake device of a tier: its passes end no sooner than such a device would have ended them.

    The tier takes GPUs of which a Ray started for it is told though they are not there. Its model is its own, on the CPU; or
    with an ``agreement`` a toy, for which the tier's source has the tokenizer and the limits. With a ``recording``, too, the
    toy says along recorded texts what the models said that were recorded.
    """

    # milliseconds of a pass by its tokens; linear between the points and after the last
    pass_ms: Annotated[dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]], Field(min_length=1)]
    context_ms: Annotated[float, Field(ge=0)] = 0.0  # milliseconds that 1,000 positions held add to a pass
    stretch: Annotated[float, Field(ge=1)] = 1.0  # slows everything down by this factor, so that few cores carry many devices
    # makes tiers toys: share of own tokens in common with the next tier, of this tier and each above; the full one's is empty
    agreement: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = None
    # file of a recording that toys say along, the same for all tiers
    recording: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _recorded_of_toys(self) -> Self:
        if self.recording is not None and self.agreement is None:
            raise ValueError(f"emulated.recording is {self.recording!r} without emulated.agreement: give both")
        return self

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Tokens and seconds of passes, without context, as they are stretched."""
        return tuple((tokens, ms * 1e-3 * self.stretch) for tokens, ms in sorted(self.pass_ms.items()))

    @property
    def context_s(self) -> float:
        """Seconds that each position held adds, as they are stretched."""
        return self.context_ms * 1e-6 * self.stretch


def emulation_problems(devices: Mapping[str, EmulatedConfig | None]) -> Iterator[str]:
    """A sentence for each reason why tiers, bottom to top, cannot have these devices together."""
    there = {name: device for name, device in devices.items() if device is not None}
    if there and len(there) < len(devices):
        real = next(name for name in devices if name not in there)
        yield f"tier {real!r} has a real device and tier {next(iter(there))!r} an emulated one: emulate all tiers or none"
    if len({device.stretch for device in there.values()}) > 1:
        yield "tiers differ in emulated.stretch: all share one time, so give them the same"
    if len({device.recording for device in there.values()}) > 1:
        yield "tiers differ in emulated.recording: what they say of a text belongs together, so give them the same"
    toys = {name: device.agreement for name, device in there.items() if device.agreement is not None}
    if toys and len(toys) < len(there):
        real = next(name for name in there if name not in toys)
        yield f"tier {real!r} has no emulated.agreement and tier {next(iter(toys))!r} has: make all tiers toys or none"
    above: tuple[float, ...] | None = None
    for name, agreement in reversed(toys.items()):
        known = [] if above is None else ["its share with the next tier", *above]
        if agreement[bool(known) :] != (above or ()) or len(agreement) != len(known):
            yield f"emulated.agreement of tier {name!r} is {list(agreement)}: it must be [{', '.join(map(str, known))}]"
        above = agreement
