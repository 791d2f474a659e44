"""Drafters that learn from answers while they serve."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from cascade.errors import ConfigError
from cascade.settings.engine import EngineKwargs
from cascade.settings.section import Section
from cascade.training.reservoir import Limits, Reservoir
from cascade.training.versions import Versions

HEAD = "eagle3"  # the kind of head that learns
LIMITS = Limits()


class AlignmentConfig(Section):
    """Drafters that learn from answers while they serve; without this section nothing is kept and nothing learns.

    alignment: {folder: /shared/cascade}
    """

    # folder of new weights, the same wherever a tier or the learner runs
    folder: Annotated[str, Field(min_length=1)]
    # drafters that learn: names of lower tiers, and `eagle3` for the head of the full tier; by default all that can
    students: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    share: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of answers that are kept
    rows: Annotated[int, Field(ge=16)] = LIMITS.rows  # answers that are kept, half of them the newest
    row_tokens: Annotated[int, Field(ge=32)] = LIMITS.row_tokens  # last tokens of an answer with its prompt that are kept
    max_age_s: Annotated[float, Field(gt=0)] = LIMITS.max_age_s  # seconds after which an answer is dropped
    on_disk: bool = False  # keep answers in the folder, too; else in memory alone
    # environment variable of the learner with a key of Fernet, by which they are encrypted on disk
    key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    every_s: Annotated[float, Field(ge=0)] = 900.0  # seconds between two rounds; drift of acceptance begins one at once
    round_s: Annotated[float, Field(gt=0)] = 300.0  # seconds of training of each drafter in a round
    min_rows: Annotated[int, Field(ge=1)] = 128  # new answers before a round
    canary_s: Annotated[float, Field(ge=0)] = 60.0  # seconds that one replica serves new weights before the others do
    device: str | None = None  # of the learner, such as cuda:0; by default the GPU if there is one
    # of the learner: `num_cpus`, 1 by default, `num_gpus`, `resources`, `runtime_env`
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.key_env is not None and not self.on_disk:
            raise ValueError(f"key_env is {self.key_env!r}, but nothing is on disk: set on_disk to true, or remove it")
        return self

    def versions(self, student: str) -> Versions:
        """Weights that a student had since."""
        return Versions(Path(self.folder) / student)

    def reservoir(self) -> Reservoir:
        """Where answers are kept, with what lies on disk; raises `ConfigError` if that cannot be read."""
        limits = Limits(self.rows, self.row_tokens, self.max_age_s)
        if not self.on_disk:
            return Reservoir(limits, Path(self.folder), kept=False)
        if self.key_env is not None and not os.environ.get(self.key_env):
            raise ConfigError(f"alignment.key_env is {self.key_env!r}, which is not set where the learner runs: set it there")
        return Reservoir(limits, Path(self.folder), None if self.key_env is None else os.environ[self.key_env])


def students(engines: Mapping[str, EngineKwargs], chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Drafters that learn, of the tiers ``engines``, bottom to top."""
    *lower, full = engines
    head = [HEAD] if any(spec.kind == HEAD for spec in engines[full].drafters) else []
    able = [name for name in lower if not _obstacle(engines[name])]
    return chosen or (*able, *head)


def alignment_problems(engines: Mapping[str, EngineKwargs], chosen: tuple[str, ...]) -> Iterator[str]:
    """A sentence for each reason why drafters cannot learn."""
    *lower, full = engines
    for name in chosen:
        if name == full:
            yield f"alignment.students names {name!r}, the full tier, whose text is the answer: remove it"
        elif name == HEAD and not any(spec.kind == HEAD for spec in engines[full].drafters):
            yield f"alignment.students names {HEAD!r}, and tier {full!r} has no such head: remove it, or give it the drafter"
        elif name in lower and (why := _obstacle(engines[name])):
            yield f"alignment.students names {name!r}, {why}"
        elif name not in (*lower, HEAD):
            yield f"alignment.students names {name!r}: it takes {', '.join((*lower, HEAD))}"
    if not students(engines, chosen):
        yield "alignment has nobody to teach: give a lower tier that is not quantized, or the full tier an eagle3 head"


def _obstacle(engine: EngineKwargs) -> str:
    """Why a tier's model cannot get new weights while it runs; "" if it can."""
    if engine.quantization is not None:
        return f"whose quantization is {engine.quantization!r}, and learnt weights are not quantized: remove one of the two"
    if any(spec.reads for spec in engine.drafters):
        return "which a head reads that would not fit it any more: remove its drafter, or remove it"
    return ""
