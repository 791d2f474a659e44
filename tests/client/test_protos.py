"""The protocols: generated code is that of `protos/`, and everything in them is explained."""

import importlib.metadata
import importlib.resources
import re
from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"
FILES = sorted(PROTOS.rglob("*.proto"))
DEFINITION = re.compile(r"(service|message|enum|rpc)\s+\w+|(optional |repeated )?[\w.]+ \w+ = \d+;")


def undocumented(text: str) -> list[str]:
    """Definitions that have no comment in the line above them."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for above, line in zip(["", *lines], lines, strict=False) if DEFINITION.match(line) and above[:2] != "//"]


def test_generated_code_is_that_of_the_protos(tmp_path: Path) -> None:
    """Guards against protos that were changed without `make proto`, and against generated code that was changed by hand."""
    builtin = importlib.resources.files("grpc_tools") / "_proto"
    outs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    sources = [str(path.relative_to(PROTOS)) for path in FILES]
    assert protoc.main(["protoc", f"-I{PROTOS}", f"-I{builtin}", *outs, *sources]) == 0
    generated = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    assert len(generated) == 2 * len(FILES)
    package = ROOT / "cascade" / "v1"
    kept = {path.relative_to(ROOT): path.read_text() for path in package.glob("*.py*") if path.name != "__init__.py"}
    stale = [str(path) for path in generated.keys() | kept.keys() if generated.get(path) != kept.get(path)]
    assert not stale, f"run `make proto` with grpcio-tools {importlib.metadata.version('grpcio-tools')}: {stale} differ"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_everything_is_explained(path: Path) -> None:
    """Guards the protocol as documentation: no service, call, message or field without a comment above it."""
    text = path.read_text()
    assert len(DEFINITION.findall(text)) > 20
    assert undocumented(text) == []
