"""Which replicas an update replaces: applications built from two configurations, judged by Ray Serve's own functions."""

from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private import deploy_utils
from ray.serve._private.build_app import build_app
from ray.serve._private.deploy_utils import deploy_args_to_deployment_info, get_deploy_args
from ray.serve._private.deployment_state import DeploymentTargetState
from ray.serve._private.version import DeploymentVersion
from ray.serve.schema import DeploymentSchema

from cascade.errors import ConfigError
from cascade.settings.config import COMPARED_BY_SERVE, READ_BY_ROUTERS, fixed_of_router, fixed_of_tier
from cascade.settings.deployment import DeploymentConfig
from deployments.app import bind, parse
from deployments.replica import check_alike, packages
from tests import small

Values = dict[str, Any]
LIMITS = {name: {"context_len": 1024, "vocab_size": 4096} for name in ("tiny", "medium", "full")}
ALL = {"tiny", "medium", "full", "router"}


@pytest.fixture(scope="module")
def built() -> Iterator[Callable[..., dict[str, DeploymentVersion]]]:
    """Versions of the deployments as Serve's controller gets them; each build has another version of the application."""
    context = SimpleNamespace(get_job_id=lambda: "01", runtime_env={})  # whether other tests of this process have a Ray or not
    applications = count()

    def versions(values: Values, limits: Any = LIMITS) -> dict[str, DeploymentVersion]:
        application = build_app(bind(parse(values), limits), name="updated")
        by_name, code = {}, f"application {next(applications)}"
        for deployment in application.deployments:
            config, replica = deployment._deployment_config, deployment._replica_config
            arguments = get_deploy_args(deployment.name, deployment_config=config, replica_config=replica, version=code)
            info = deploy_args_to_deployment_info(app_name="updated", **arguments)
            by_name[deployment.name] = DeploymentTargetState.create(info, 1).version
        return by_name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deploy_utils.ray, "get_runtime_context", lambda: context)
        yield versions


def values() -> Values:
    return small.config().model_dump(mode="json")


@pytest.fixture(scope="module")
def old(built: Callable[..., dict[str, DeploymentVersion]]) -> dict[str, DeploymentVersion]:
    return built(values())


def set_at(path: str, value: Any) -> Callable[[Values], None]:
    def change(values: Values) -> None:
        *sections, key = path.split(".")
        part: Any = values
        for section in sections:
            part = part[int(section)] if isinstance(part, list) else part[section]
        part[key] = value

    return change


CORPUS = {"kind": "corpus", "source": "a.txt"}
LINK_TLS = {"certificate": "a.pem", "key": "b.pem", "authority": "c.pem", "server_name": "x"}
CHANGES: list[tuple[Callable[[Values], None], set[str], set[str]]] = [  # what is replaced, what is told
    (lambda values: None, set(), set()),
    (set_at("tiers.0.model_loading_config.model_source", "/new/tiny"), {"tiny"}, set()),
    (set_at("tiers.1.deployment_config.ray_actor_options", {"num_cpus": 0.25}), {"medium"}, set()),
    (set_at("tiers.1.deployment_config.ray_actor_options.runtime_env", {"env_vars": {"AGAIN": "1"}}), {"medium"}, set()),
    (set_at("tiers.2.engine_kwargs.max_pass_tokens", 64), {"full"}, set()),
    (set_at("tiers.2.model_loading_config.model_source", "/new"), {"full", "router"}, set()),
    (set_at("tiers.2.deployment_config.max_ongoing_requests", 8), {"router"}, {"full"}),
    (set_at("tiers.1.deployment_config.num_replicas", 3), set(), set()),
    (set_at("tiers.1.deployment_config.max_surge_percent", 50), set(), set()),
    (set_at("tiers.0.engine_kwargs.drafter", [CORPUS]), ALL, set()),
    (set_at("window", 9), {"router"}, set()),
    (set_at("router.max_running", 3), {"router"}, set()),
    (set_at("router.tool_format", "json"), {"router"}, set()),
    (set_at("max_model_len", 512), {"router"}, set()),
    (set_at("alignment", {"folder": "/shared"}), {"router"}, set()),
    (set_at("link_tls", LINK_TLS), ALL, set()),
    (set_at("link_ports", [20_000, 20_010]), ALL, set()),
]


@pytest.mark.parametrize(("change", "replaced", "reconfigured"), CHANGES)
def test_only_what_changed_is_replaced(
    built: Callable[..., dict[str, DeploymentVersion]],
    old: dict[str, DeploymentVersion],
    change: Callable[[Values], None],
    replaced: set[str],
    reconfigured: set[str],
) -> None:
    """Guards service while a configuration is exchanged: one changed word replaced the replicas of all deployments."""
    after = values()
    change(after)
    new = built(after)
    assert {name for name in old if old[name].requires_actor_restart(new[name])} == replaced
    assert {name for name in old if old[name].requires_actor_reconfigure(new[name])} - replaced == reconfigured


def test_routers_are_replaced_when_the_limits_of_models_change(
    built: Callable[..., dict[str, DeploymentVersion]], old: dict[str, DeploymentVersion]
) -> None:
    """Guards prompts against a router that admits by the contexts of models that are gone."""
    new = built(values(), {**LIMITS, "tiny": {"context_len": 512, "vocab_size": 4096}})
    assert {name for name in old if old[name].requires_actor_restart(new[name])} == {"router"}


def paths(values: Any, prefix: str = "") -> set[str]:
    if not isinstance(values, dict) or not values:
        return {prefix[:-1]}
    return set[str]().union(*(paths(value, f"{prefix}{key}.") for key, value in values.items()))


def test_no_change_is_without_effect() -> None:
    """Guards options against being changed without a word: each replaces replicas, or is Serve's own."""
    config = small.config()
    tier = config.tiers[0].model_dump(mode="json")
    assert set(fixed_of_tier(config, config.tiers[0])["tier"]) | {*COMPARED_BY_SERVE} == set(tier)
    served = {path for path in paths(config.model_dump(mode="json")) if not path.startswith("router.deployment_config")}
    fixed = fixed_of_router(config)
    read = fixed.pop("full")
    assert paths(fixed) - {"drafters", "asleep"} == served - {"verify"}
    assert set(read) == set(tier["model_loading_config"]) | READ_BY_ROUTERS | {"max_ongoing_requests"}


def test_every_option_of_serve_is_known() -> None:
    """Guards options of Ray Serve against being forgotten: each is passed on, but for what cascade sets itself or never has."""
    ours = {"name", "user_config", "gang_scheduling_config", "deployment_actors"}
    grouped = {f"placement_group_{part}" for part in ("bundles", "strategy", "bundle_label_selector")}
    assert set(DeploymentSchema.model_fields) == set(DeploymentConfig.model_fields) | ours | grouped


def test_nodes_with_other_packages_are_told() -> None:
    """Guards texts against nodes whose packages drifted apart; builds of one version for other devices are alike."""
    here = packages()
    assert "+" not in here["torch"]
    check_alike({**here, "vllm": "9.9"} if "vllm" not in here else here)
    with pytest.raises(ConfigError, match=r"This node has torch .*, and the application was built with 1\.0"):
        check_alike({**here, "torch": "1.0"})
