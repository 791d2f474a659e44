"""The house has floors: imports go down, never up."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests import small

ROOT = Path(__file__).parent.parent
FLOORS = (  # of rooms, bottom to top: a folder, or a module beside them; those of one floor do not know each other
    ("cascade.errors", "cascade.v1"),
    ("cascade.params", "cascade.draft", "cascade.splitmix", "cascade.prompts"),
    ("cascade.messages",),
    ("cascade.scorer", "cascade.answer"),
    ("cascade.cpu", "cascade.planner"),
    ("cascade.drafters", "cascade.client"),
    ("cascade.session", "cascade.engine"),
    ("cascade.tier", "cascade.chat"),
    ("cascade.family", "cascade.training", "cascade.simulation"),
    ("cascade.settings",),
    ("cascade.local",),
    ("cascade.llm",),
    ("cascade.agreement",),
    ("deployments.ray_compat", "deployments.replica"),
    ("deployments.ops.metrics", "deployments.ops.tracing", "deployments.ops.workers"),
    ("deployments.links",),
    ("deployments.gateway.admission",),
    ("deployments.gateway.model", "deployments.ops.learner", "deployments.ops.collector"),
    ("deployments.gateway.chat", "deployments.full_tier"),
    ("deployments.gateway.grpc", "deployments.gateway.http"),
    ("deployments.tier", "deployments.router"),
    ("deployments.app",),
    ("deployments.ops.launch", "deployments.llm"),
    ("cascade.cli",),
)
LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
WIRED = ("cascade/client/", "cascade/v1/", "cascade/cli/")  # of the library, those that speak to servers, and start them
SERVING = {"ray", "grpc", "fastapi", "starlette", "uvicorn", "google", "deployments"}


def room(module: str) -> str:
    """``cascade.session`` for ``cascade.session.branches``; a house of rooms has one more part: ``deployments.ops.metrics``."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] in (["gateway"], ["ops"]) else 2])


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere, under ``if TYPE_CHECKING`` too."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module in ("cascade", "deployments")
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if whole else {node.module}
    return names


def files(*packages: str) -> list[tuple[str, Path]]:
    paths = (path for package in packages for path in sorted((ROOT / package).rglob("*.py")))
    return [(".".join(path.relative_to(ROOT).with_suffix("").parts), path) for path in paths]


def test_imports_go_down() -> None:
    """Guards against circles: a room knows only what lies on lower floors, and every room has its floor."""
    for module, path in files("cascade", "deployments"):
        here = room(module)
        if here.endswith(".__init__"):
            continue  # public names of the package
        for other in {room(name) for name in imported(path) if name.split(".")[0] in ("cascade", "deployments")} - {here}:
            assert LEVELS[other] < LEVELS[here], f"{module} imports {other}"


DATA = ("pandas", "pyarrow")  # which Ray Serve imports where they are installed, and does without
HEAVY = {
    "deployments.router": "torch transformers",
    "cascade.cli.main": "torch transformers",
    "cascade": "torch grpc",
    "cascade.client": "torch ray transformers numpy pydantic",
}


@pytest.mark.parametrize("module", HEAVY)
def test_light_processes_import_nothing_heavy(module: str) -> None:
    """Guards the time for which a router that has died is away, mostly imports, and clients against a gigabyte of libraries."""
    listed = f"import sys; sys.modules.update(dict.fromkeys({DATA})); import {module}; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", listed], cwd=ROOT, text=True)
    assert not {*loaded.split()} & {*HEAVY[module].split()}


UNUSED = ("transformers", "torch.distributed.tensor", "torch._dynamo", "sympy")


def test_a_tier_of_the_llama_family_imports_no_code_of_models() -> None:
    """Guards the start: each tier took three seconds to import what its own network does without."""
    program = "import sys; from deployments.tier import load_model; from cascade.settings.config import TierConfig"
    tier = {"name": "tiny", "model_loading_config": {"model_id": small.paths()[0]}, "engine_kwargs": {"device": "cpu"}}
    program += f"; load_model(TierConfig.model_validate({tier!r})); print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert not {*loaded.split()} & {*UNUSED}


def test_the_library_knows_no_serving() -> None:
    """Guards the library against Ray and the wire, and all but the engine against Transformers: any scorer must do."""
    for module, path in files("cascade"):
        names = {name.split(".")[0] for name in imported(path)}
        if not str(path.relative_to(ROOT)).startswith(WIRED):
            assert not names & SERVING, module
        if room(module) not in ("cascade.engine", "cascade.settings", "cascade.training"):
            assert not names & {"transformers", "tokenizers"}, module


def test_only_the_command_line_prints() -> None:
    """Guards against prints in library code."""
    for module, path in files("cascade", "deployments"):
        calls = [node.func for node in nodes(path) if isinstance(node, ast.Call)]
        printed = any(isinstance(call, ast.Name) and call.id == "print" for call in calls)
        assert not printed or room(module) == "cascade.cli", module
