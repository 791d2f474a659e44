"""Reads the configuration of a cascade from a file, which may also be one of Ray Serve LLM or for ``serve deploy``."""

from collections.abc import Mapping
from pathlib import Path

from cascade.errors import ConfigError
from cascade.settings import llm_configs
from cascade.settings.config import CascadeConfig


def load_config(path: Path) -> CascadeConfig:
    """Read a YAML file; one for ``serve deploy`` must have exactly one cascade. Raises `ConfigError`."""
    values = llm_configs.read_yaml(path)
    if isinstance(values, Mapping) and isinstance(values.get("applications"), list):
        arguments = [value.get("args") for value in values["applications"] if isinstance(value, Mapping)]
        cascades = [value for value in arguments if isinstance(value, Mapping) and {"tiers", "llm_configs"} & value.keys()]
        if len(cascades) != 1:
            raise ConfigError(f"{path} has {len(cascades)} applications with tiers or llm_configs: give a file with one")
        values = cascades[0]
    if not (isinstance(values, Mapping) and "llm_configs" in values):
        return CascadeConfig.parse(values, str(path))
    [config, *others] = llm_configs.cascades(values)[0].values()
    if others:
        raise ConfigError(
            f"{path} has {1 + len(others)} llm_configs: give a file with one, or deploy it by `serve deploy` with "
            "import_path deployments.llm:build_openai_app"
        )
    return config
