"""What all parts of a configuration have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Unknown keys are errors, and nothing changes later."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
