"""Drafters that learn from answers while they serve."""

import os
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from cascade.errors import ConfigError
from cascade.settings.deployment import ActorOptions
from cascade.settings.engine import EngineKwargs
from cascade.settings.section import Count, Seconds, Section, Text, Variable
from cascade.training.reservoir import Reservoir
from cascade.training.versions import Versions


class AlignmentConfig(Section):
    """Drafters that learn from answers while they serve. Without this section no answers are kept, and no drafter learns.

    alignment: {folder: /shared/cascade}
    """

    folder: Text  # folder for new weights, shared by all nodes
    # names of the lower tiers that learn; by default all that can
    students: tuple[Text, ...] = ()
    rows: Annotated[int, Field(ge=16)] = 2000  # answers that are kept, half of them the newest
    row_tokens: Annotated[int, Field(ge=32)] = 512  # last tokens kept of each prompt with its answer
    max_age_s: Seconds = 7 * 86_400.0  # seconds until an answer is dropped
    on_disk: bool = False  # keep answers also in the folder, not only in memory
    # environment variable with a Fernet key that encrypts answers on disk
    key_env: Variable | None = None
    every_s: Annotated[float, Field(ge=0)] = 900.0  # seconds between two rounds; falling acceptance starts one at once
    round_s: Seconds = 300.0  # seconds that each drafter trains in a round
    min_rows: Count = 128  # new answers that a round needs
    canary_s: Annotated[float, Field(ge=0)] = 60.0  # seconds that one replica tries new weights
    device: str | None = None  # device of the learner, such as cuda:0; by default the GPU if there is one
    num_workers: Count = 1  # processes that train a drafter together, by Ray Train
    # resources of the learner, or of each of several workers: `num_gpus`, ...
    ray_actor_options: ActorOptions = Field(default_factory=ActorOptions)

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.key_env is not None and not self.on_disk:
            raise ValueError(f"key_env is {self.key_env!r}, but nothing is on disk: set on_disk to true, or remove it")
        if self.num_workers > 1 and self.device is not None:
            raise ValueError(
                f"device is {self.device!r} of {self.num_workers} workers: remove it, as num_gpus of ray_actor_options gives "
                "each its own"
            )
        return self

    def versions(self, student: str) -> Versions:
        """The weights that a student has learned so far."""
        return Versions(Path(self.folder) / student)

    def reservoir(self) -> Reservoir:
        """The store of answers, with those on disk; raises `ConfigError` if these cannot be read."""
        key = os.environ.get(self.key_env) if self.key_env is not None else None
        if self.key_env is not None and not key:
            raise ConfigError(f"alignment.key_env is {self.key_env!r}, which is not set where the learner runs: set it there")
        return Reservoir(
            Path(self.folder), key, rows=self.rows, row_tokens=self.row_tokens, max_age_s=self.max_age_s, on_disk=self.on_disk
        )


def obstacle(engine: EngineKwargs) -> str:
    """Why a lower tier cannot get new weights while it runs; "" if it can."""
    if engine.quantization is not None:
        return f"whose quantization is {engine.quantization!r}, and learned weights are not quantized: remove one of the two"
    if engine.layers:
        return "which is some layers of its model, and learns nothing by itself: remove its layers or the name"
    if engine.lora_modules:
        return "whose adapters would not fit new weights: remove them or the name"
    if any(spec.reads for spec in engine.drafters):
        return "whose head would not fit new weights: remove the head or the name"
    return ""
