"""The image of cluster/Dockerfile: what it copies, what is installed in it and by whom it runs. No daemon builds it here."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from cascade.cli.serve import serve
from cascade.settings.router import ListenConfig
from deployments.gateway.admission.access import REQUIRED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # where Python does not find this checkout


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage by its name, and what they are given: "" is the last stage, "ARG" what stands before all."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "cluster" / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    by_name: dict[str, list[tuple[str, str]]] = {"ARG": []}
    for line in filter(None, text.splitlines()):
        instruction, given = line.split(maxsplit=1)
        if instruction == "FROM":
            by_name[given.partition(" AS ")[2]] = []
        list(by_name.values())[-1].append((instruction, given))
    return by_name


def given(stage: str, instruction: str) -> list[str]:
    return [text for name, text in stages()[stage] if name == instruction]


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    return listed.stdout.strip("\0").split("\0")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first stage makes of the files that it copies."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in [name for text in given("wheel", "COPY") for name in text.split()[:-1]]:
        files = [file for file in tracked() if file == name or file.startswith(f"{name}/")]
        assert files, name
        for file in files:
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            (source / file).write_bytes((ROOT / file).read_bytes())
    quick = {"--build-option": ["--compression=stored"]}  # to pack weights takes seconds
    build = f"import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1], {quick}))"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, env=ALONE, capture_output=True, check=True)
    [made] = folder.iterdir()
    return made


def test_the_wheel_is_whole_and_runs_where_nothing_else_is(wheel: Path, tmp_path: Path) -> None:
    """Guards images against a package without its weights or its page, and against code that runs only beside its checkout."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    [here] = (tmp_path / "venv" / "lib").glob("*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(here)
    ours = {file for file in tracked() if file.startswith(("cascade/", "deployments/"))}
    assert {file for file in ours if not (here / file).exists()} <= {"cascade/family/weights/README.md"}
    (here / "needed.pth").write_text(sysconfig.get_path("purelib"))  # the packages that it needs, but no checkout
    run = (
        "import sys; from importlib.metadata import entry_points as all; import cascade\n"
        "print(cascade.__file__)\n"
        "[command] = all(group='console_scripts', name='cascade')\n"
        "sys.argv[1:] = 'top --once --address 127.0.0.1:9'.split(); command.load()()"
    )
    result = subprocess.run([python, "-c", run], cwd=tmp_path, env=ALONE, capture_output=True, text=True, check=False)
    assert "No server answers" in result.stderr
    assert Path(result.stdout.splitlines()[0]).is_relative_to(here)


def test_packages_of_the_image_are_those_of_the_project(tmp_path: Path) -> None:
    """Guards the layer of dependencies, which is made without the package: it has all that the package asks for, and extras."""
    arguments = dict(text.split("=", 1) for text in given("dependencies", "ARG"))
    listing = next(text for text in given("dependencies", "RUN") if "requirements.txt" in text)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    path = {**ALONE, **arguments, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["sh", "-euc", listing], cwd=tmp_path, env=path, check=True)
    extras = [need for extra in arguments["EXTRAS"].split(",") for need in PROJECT["optional-dependencies"][extra]]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == [*PROJECT["dependencies"], *extras]


def test_bases_are_named_and_nobody_is_root() -> None:
    """Guards images against a base that changes by itself or has an old Python, and containers against root."""
    version = re.fullmatch(r"PYTHON=(\d+\.\d+\.\d+)-slim-[a-z]+", *given("ARG", "ARG"))
    assert version
    assert SpecifierSet(PROJECT["requires-python"]).contains(version[1])
    assert given("", "USER") == ["1000:1000"]  # numbers, by which Kubernetes knows that it is not root
    assert not {"RUN", "COPY"} & {name for name, _ in stages()[""][stages()[""].index(("USER", "1000:1000")) :]}


def test_the_container_serves_at_its_doors() -> None:
    """Guards `docker run`: the container is reached from outside, answers nobody without a key, and writes in /models alone."""
    name, subcommand, *arguments = json.loads(*given("", "CMD"))
    assert (name, subcommand) == ("cascade", "serve")
    assert serve.make_context(subcommand, arguments).params["host"] == "0.0.0.0"
    listen = ListenConfig()
    assert given("", "EXPOSE") == [f"{listen.http_port} {listen.grpc_port}"]
    assert f"http://127.0.0.1:{listen.http_port}/health" in given("", "HEALTHCHECK")[0]
    variables = dict(pair.split("=", 1) for text in given("", "ENV") for pair in text.split())
    assert variables[REQUIRED] == "1"
    caches = [variables[name] for name in ("HF_HOME", "CASCADE_CACHE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")]
    assert all(f"{value}/".startswith("/models/") for value in caches)
