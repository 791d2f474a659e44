"""Builds cascades from configurations for `ray.serve.llm:build_openai_app`, with tiers below each model.

serve run deployments.llm:build_openai_app llm_configs=my.yaml

llm_configs:
  - model_loading_config: {model_id: qwen3, model_source: Qwen/Qwen3-32B}
    accelerator_type: H100
    tiers:                              # ours: smaller models that draft, bottom to top
      - model_loading_config: {model_id: Qwen/Qwen3-0.6B}
        accelerator_type: L4
"""

from collections.abc import Mapping
from typing import Any

from ray.serve import Application

from cascade.settings.llm_configs import cascades
from deployments.app import bind_models, build


def build_openai_app(args: Mapping[str, Any]) -> Application:
    """The application of ``{"llm_configs": [...]}``: mappings, paths of YAML files, or `ray.serve.llm.LLMConfig` objects.

    One model is a cascade as `deployments.app.build` makes it. Several share one HTTP API, which goes by a request's ``model``.
    Raises `ConfigError` for whatever a cascade cannot honour.
    """
    configs, ingress = cascades(args)
    return build(*configs.values()) if len(configs) == 1 else bind_models(configs, ingress)
