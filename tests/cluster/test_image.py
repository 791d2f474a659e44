"""The image of cluster/Dockerfile: what it copies, what is installed in it and by whom it runs. No daemon builds it here."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from cascade.cli.serve import serve
from cascade.settings.router import ListenConfig
from deployments.gateway.admission.access import REQUIRED

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "cluster" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
Step = tuple[str, str]  # instruction, and what it is told


def stages() -> dict[str, list[Step]]:
    """Steps of each stage by its name; the last one has none. What stands before all of them is the stage ``arguments``."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    found: dict[str, list[Step]] = {"arguments": []}
    for line in filter(None, text.splitlines()):
        instruction, told = line.split(maxsplit=1)
        if instruction == "FROM":
            found[told.partition(" AS ")[2]] = []
        list(found.values())[-1].append((instruction, told))
    return found


def told(steps: list[Step], instruction: str) -> list[str]:
    return [text for name, text in steps if name == instruction]


def tracked() -> list[str]:
    """Files of the checkout that git knows."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    return listed.stdout.strip("\0").split("\0")


def copied(steps: list[Step]) -> list[str]:
    """Of the checkout's files, those that a stage copies."""
    sources = [source for text in told(steps, "COPY") if "--from" not in text for source in text.split()[:-1]]
    files = {source: [file for file in tracked() if file == source or file.startswith(f"{source}/")] for source in sources}
    assert all(files.values()), files  # git has each of them
    return [file for source in sources for file in files[source]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first stage makes of the files that it copies."""
    source = tmp_path_factory.mktemp("source")
    for file in copied(stages()["wheel"]):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes((ROOT / file).read_bytes())
    quick = {"--build-option": ["--compression=stored"]}  # to pack weights takes seconds
    build = f"import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1], {quick}))"
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, env=alone(), capture_output=True, check=True)
    [made] = folder.iterdir()
    return made


def alone() -> dict[str, str]:
    """An environment in which Python does not find this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    """Guards images against a package without its weights, its page or the code of its protocol."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "cascade/family/weights/tiny/model.safetensors",
        "deployments/gateway/http/page.html",
        "cascade/v1/serving_pb2.py",
    } <= names
    assert {file for file in tracked() if file.startswith(("cascade/", "deployments/"))} - names <= {
        "cascade/family/weights/README.md"
    }


def test_the_wheel_runs_where_nothing_else_is(wheel: Path, tmp_path: Path) -> None:
    """Guards images against code that runs only beside its checkout: the command works from elsewhere."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    [here] = (tmp_path / "venv" / "lib").glob("*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(here)
    (here / "needed.pth").write_text(sysconfig.get_path("purelib"))  # the packages that it needs, but no checkout
    run = (
        "import sys; from importlib.metadata import entry_points as all; import cascade\n"
        "print(cascade.__file__)\n"
        "[command] = all(group='console_scripts', name='cascade')\n"
        "sys.argv[1:] = 'top --once --address 127.0.0.1:9'.split(); command.load()()"
    )
    said = subprocess.run([python, "-c", run], cwd=tmp_path, env=alone(), capture_output=True, text=True, check=False)
    assert "No server answers" in said.stderr
    assert Path(said.stdout.splitlines()[0]).is_relative_to(here)


def test_packages_of_the_image_are_those_of_the_project(tmp_path: Path) -> None:
    """Guards the layer of dependencies, which is made without the package: it has all that the package asks for, and extras."""
    steps = stages()["dependencies"]
    arguments = dict(text.split("=", 1) for text in told(steps, "ARG"))
    assert arguments["DEVICE"] == "cuda"
    script = next(text for text in told(steps, "RUN") if "tomllib" in text)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["sh", "-euc", script], cwd=tmp_path, env={**alone(), **arguments, "PATH": path}, check=True)
    extras = [need for extra in arguments["EXTRAS"].split(",") for need in PROJECT["optional-dependencies"][extra]]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == [*PROJECT["dependencies"], *extras]
    installs = next(text for text in told(steps, "RUN") if "$DEVICE" in text)
    for device, code in (("cuda", 0), ("cpu", 0), ("tpu", 1)):
        pip = 'pip() { for last; do :; done; echo "$last"; }'
        said = subprocess.run(
            ["sh", "-euc", f"{pip}; {installs}"],
            cwd=tmp_path,
            env={**os.environ, "DEVICE": device},
            capture_output=True,
            text=True,
        )
        assert said.returncode == code, said.stderr
        assert code or Requirement(said.stdout.strip()).name == "torch"
    assert "DEVICE is 'tpu'" in said.stderr


def test_bases_are_named_and_nobody_is_root() -> None:
    """Guards images against a base that changes by itself or has an old Python, and containers against root."""
    found = stages()
    [argument] = told(found["arguments"], "ARG")
    version = re.fullmatch(r"PYTHON=(\d+\.\d+\.\d+)-slim-[a-z]+", argument)
    assert version
    assert SpecifierSet(PROJECT["requires-python"]).contains(version[1])
    assert {told(steps, "FROM")[0].partition(" AS ")[0] for name, steps in found.items() if name != "arguments"} == {
        "python:${PYTHON}"
    }
    last = found[""]
    names = [name for name, _ in last]
    assert [text for name, text in last if name == "USER"] == [
        "1000:1000"
    ]  # numbers, by which Kubernetes knows that it is not root
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))
    installed = next(text for text in told(last, "RUN") if "apt-get" in text)
    assert {"gcc", "libc6-dev", "tini", "wget"} <= set(shlex.split(installed))  # of which Triton takes the first two


def test_the_container_serves_at_its_doors() -> None:
    """Guards `docker run`: its command is one that we have, listens outside the container, and is asked how it is."""
    last = stages()[""]
    [command] = told(last, "CMD")
    name, subcommand, *arguments = words(command)
    assert (name, subcommand) == ("cascade", "serve")
    assert serve.make_context(subcommand, list(arguments)).params["host"] == "0.0.0.0"
    doors = ListenConfig()
    assert told(last, "EXPOSE") == [f"{doors.http_port} {doors.grpc_port}"]
    [health] = told(last, "HEALTHCHECK")
    assert f"http://127.0.0.1:{doors.http_port}/health" in words(health.partition(" CMD ")[2])


def test_the_container_is_closed_and_writes_little() -> None:
    """Guards `docker run`, which listens everywhere, against answering everybody; and read-only images against other caches."""
    said = dict(pair.split("=", 1) for text in told(stages()[""], "ENV") for pair in text.split() if "=" in pair)
    assert said[REQUIRED] == "1"
    caches = {name: value for name, value in said.items() if name.endswith(("CACHE", "HOME", "DIR"))}
    assert {"HF_HOME", "CASCADE_CACHE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"} <= caches.keys()
    assert all(value == "/models" or value.startswith("/models/") for value in caches.values())


def words(text: str) -> list[str]:
    """The words of an instruction in JSON's form."""
    found: list[str] = json.loads(text)
    return found
