"""A model on a device that is not there: a fake, for measuring whole clusters on machines without such devices.

An engine of its own for tiers (`load`): ``engine_kwargs: {engine: "benchmarks.cluster.emulated:load", emulated: {...}}``.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from cascade.engine.model_config import context_len, read_config
from cascade.planner.cost import Profile
from cascade.scorer import Row, Runs, Scored, Scorer, Store
from cascade.settings.config import CascadeConfig, TierConfig
from cascade.settings.section import NUMERIC, Count, Section
from cascade.simulation.recording import RecordedTier, Recording
from cascade.simulation.toy_tier import ToyTier
from deployments.tier import load_model

log = logging.getLogger(__name__)


class Device(Section):
    """A fake device of a tier, whose model is its own, on the CPU; or a toy with an ``agreement``."""

    # milliseconds of a pass by its tokens; linear between the points and after the last
    pass_ms: Annotated[dict[Count, Annotated[float, Field(gt=0), NUMERIC]], Field(min_length=1)]
    context_ms: Annotated[float, Field(ge=0), NUMERIC] = 0.0  # that 1,000 positions held add to a pass
    stretch: Annotated[float, Field(ge=1), NUMERIC] = 1.0  # slows everything down, so that few cores carry many devices
    # share of own tokens in common with the next tier, of this tier and each above; the full one's is empty
    agreement: tuple[Annotated[float, Field(ge=0, le=1), NUMERIC], ...] | None = None
    recording: str | None = None  # file that toys say along, the same for all tiers

    @classmethod
    def of(cls, tier: TierConfig) -> "Device":
        return cls.model_validate((tier.engine_kwargs.model_extra or {})["emulated"])

    @property
    def cost(self) -> Profile:
        """Of passes, as they are stretched."""
        points = tuple((tokens, ms * 1e-3 * self.stretch) for tokens, ms in sorted(self.pass_ms.items()))
        return Profile(points, self.context_ms * 1e-6 * self.stretch)

    def toy(self, vocab_size: int, **limits: int) -> ToyTier:
        """The toy, which has recorded own tokens if there is a recording; raises `ConfigError`."""
        assert self.agreement is not None
        if self.recording is None:
            return ToyTier(vocab_size, self.agreement, **limits)
        return RecordedTier(vocab_size, self.agreement, Recording.load(Path(self.recording)), **limits)


def load(config: TierConfig) -> "Emulated":
    """The model of a tier, or a toy, on its emulated device."""
    device, engine, source = Device.of(config), config.engine_kwargs, config.model_loading_config.source
    if device.agreement is None:
        own = engine.model_copy(update={"engine": "cascade", "device": "cpu"})
        model = load_model(config.model_copy(update={"engine_kwargs": own}))
        dtype = str(model.dtype).removeprefix("torch.")
        return Emulated(model, device.cost, num_parameters=model.num_parameters, dtype=dtype, same_bits=model.same_bits)
    read = read_config(source, **engine.hub)
    limits = {"context_len": context_len(read)} | ({} if engine.cache_tokens is None else {"cache_tokens": engine.cache_tokens})
    return Emulated(device.toy(read.get_text_config().vocab_size, **limits), device.cost)


def num_gpus(config: CascadeConfig) -> int:
    """GPUs that a Ray has to be told of though they are not there: those of all replicas."""
    counts = [tier.deployment_config.num_replicas for tier in config.tiers]
    gpus = [tier.resources.get("GPU", 0.0) for tier in config.tiers]
    return math.ceil(sum(each * (count if isinstance(count, int) else 1) for each, count in zip(gpus, counts, strict=True)))


class Emulated(Runs):
    """Scores as ``model`` does, in the time that a device takes for which passes cost what ``cost`` says.

    A pass ends when the device would have ended it, not sooner: what is left of its time after the model's own pass is slept.
    Where the model takes longer than the device, the pass is *late*, and its time that of this machine. Beside a `Scorer`'s it
    has what a replica tells of a model.
    """

    device = "emulated"
    healthy = True

    def __init__(
        self,
        model: Scorer,
        cost: Profile,
        *,
        num_parameters: int = 0,
        dtype: str = "toy",
        same_bits: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """``cost`` is for tokens of a pass and positions held, and stays as it is; ``clock`` and ``sleep`` are in seconds."""
        self._model = model
        self._cost = cost
        self.vocab_size, self.context_len, self.cache_tokens = model.vocab_size, model.context_len, model.cache_tokens
        self.num_parameters = num_parameters
        self.dtype = dtype
        self.same_bits = same_bits
        self.shapes = not isinstance(model, ToyTier)  # honours more than temperature and the filters of likely tokens
        self._clock = clock
        self._sleep = sleep
        self.passes = 0
        self.late = 0  # passes that took longer than the device takes

    @property
    def summary(self) -> str:
        return f"a FAKE: {self.dtype} on a device that is not there, whose shortest pass takes {self._cost.predict(1):.4f} s"

    @property
    def profile(self) -> Profile:
        return Profile(self._cost.points, self._cost.context_s)

    def new_cache(self) -> Store:
        return self._model.new_cache()

    def renew(self, source: str) -> None:
        """Go on with other weights, which the device has at once; see `cascade.engine.model.Model.renew`."""
        self._model.renew(source)  # type: ignore[attr-defined]  # a toy has no weights, and no student is one

    def launch(self, rows: Sequence[Row]) -> tuple[float, Any]:
        """When the device will have the own tokens of ``rows``, and what the model's `collect` takes."""
        return self._clock() + self.seconds(rows), self._model.launch(rows)

    def collect(self, launched: tuple[float, Any]) -> list[Scored]:
        """Own tokens of each row, see `cascade.scorer.Scorer`, not before the device has them."""
        end, rows = launched
        scored = self._model.collect(rows)
        left = end - self._clock()
        self.passes += 1
        if left > 0:
            self._sleep(left)
            return scored
        if not self.late:
            log.warning("A pass of %d rows ended %.4f s later than the device's would have: stretch time", len(scored), -left)
        self.late += 1
        return scored

    def seconds(self, rows: Sequence[Row]) -> float:
        """That the device takes for a pass."""
        return self._cost.predict(sum(len(row.input_ids) for row in rows), sum(row.start for row in rows))

    def close(self) -> None:
        """There is nothing outside this process."""
