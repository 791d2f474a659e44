"""The pages on clusters: their commands and configurations are those of the programs."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from ray.scripts.scripts import cli as ray_command
from ray.serve.scripts import cli as serve_command

from cascade.cli.main import main as cascade_command
from tests.cluster.kubernetes import KINDS, unknown

ROOT = Path(__file__).parents[2]
PAGES = ("start/cluster", "howto/kubernetes", "howto/bare-machines", "howto/troubleshoot")
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES)
PROGRAMS: dict[str, click.Group] = {"cascade": cascade_command, "ray": ray_command, "serve": serve_command}
FOREIGN = {"aws", "docker", "export", "gcloud", "kubectl", "sed", "pip", "python3.11", "."}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[list[str]]:
    """Words of each command, also of those that `ray exec` runs elsewhere and containers run inside."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(re.sub(r"\$\((.*?)\)", "", line), posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, "&&"]:
            if not set(word) <= set("&|;"):
                command.append(word)
                continue
            while command and re.match(r"\w+=", command[0]):
                command = command[1:]
            if command:
                yield command
            if command[:2] == ["ray", "exec"]:
                yield from commands(command[-1])
            if command[:2] == ["docker", "run"] and "cascade" in command:
                yield command[command.index("cascade") :]
            command = []


def test_commands_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards readers against commands, options and files that do not exist."""
    monkeypatch.chdir(ROOT)
    mine = tmp_path / "my.yaml"
    mine.write_text("tiers: []")
    seen = set[str]()
    for program, *words in (command for block in blocks("sh") for command in commands(block)):
        group = PROGRAMS.get(program.rpartition("/")[2])
        if group is None:
            assert program in FOREIGN, program
        else:
            name, *arguments = [str(mine) if word == "/my.yaml" else word for word in words]
            group.commands[name].make_context(name, [word.replace("cascade-serve/", "", 1) for word in arguments])
            seen.add(f"{program} {name}")
        files = [word.removeprefix("cascade-serve/") for word in words if re.match(r"(cascade-serve/)?cluster/\S+$", word)]
        assert all((ROOT / file).exists() for file in files), files
    assert {"ray start", "ray up", "ray exec", "ray attach"} <= seen
    assert {"serve deploy", "serve status", "cascade generate", "cascade serve"} <= seen


def test_files_and_configurations_are_taken() -> None:
    """Guards the table of files against those that it lacks, and copied configurations against fields that nobody knows."""
    named = set(re.findall(r"`(cluster/[\w./-]+\w)`", PAGE)) | {f"cluster/ray-up/{name}.yaml" for name in ("gcp", "local")}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "cluster").rglob("*") if path.is_file()}
    assert there - {"cluster/README.md"} == {name for name in named if (ROOT / name).is_file()}
    assert all((ROOT / name).exists() for name in named), named
    for values in map(yaml.safe_load, blocks("yaml")):
        if "spec" in values and values.get("kind", "RayService") in KINDS:
            assert list(unknown(values)) == []
