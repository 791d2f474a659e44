"""Which options of a model several ranks can share. Needs no torch, so that a configuration is read without it."""

from collections.abc import Mapping

SHARED_QUANTIZATION = "int8"  # the one whose numbers ranks can share, see `cascade.engine.quantization.quantize_shares`


def sharing_problem(ranks: int, quantization: str | None, adapters: Mapping[str, str]) -> str | None:
    """Why ``ranks`` cannot share a model that is held like this; ``None`` if they can."""
    if ranks == 1 or quantization is None:
        return None
    if quantization != SHARED_QUANTIZATION:
        return (
            f"tensor_parallel_size is {ranks}, which quantization {quantization} cannot be combined with: "
            f"take {SHARED_QUANTIZATION}, or one rank"
        )
    if adapters:
        return f"tensor_parallel_size is {ranks}, which takes quantization or lora_modules, not both; remove one"
    return None
