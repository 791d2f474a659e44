"""The house has doors that open one way."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cascade"
FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if "v1" not in p.parts]
SERVING = {"ray", "grpc", "fastapi", "starlette", "google", "deployments"}
TRANSFORMERS = {
    "attention.py",
    "kv.py",
    "model.py",
    "tokenizer.py",
    "adapters.py",
    "check.py",
    "checkpoint.py",
    "loading.py",
    "parallel.py",
    "quantization.py",
}


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, without `if TYPE_CHECKING`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_library_knows_no_serving(path: Path) -> None:
    """Guards the library against Ray and the wire: only the client speaks gRPC and only the CLI starts servers."""
    if path.name not in ("client.py", "cli.py"):
        assert not imported(path) & SERVING


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_few_files_know_transformers(path: Path) -> None:
    """Guards the seam of the model: sessions, tiers and planners must work with any scorer."""
    if path.name not in TRANSFORMERS and "family" not in path.parts:
        assert not imported(path) & {"transformers", "tokenizers"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_cli_prints(path: Path) -> None:
    """Guards against prints in library code."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    if path.name != "cli.py":
        assert not any(isinstance(call, ast.Name) and call.id == "print" for call in calls)
