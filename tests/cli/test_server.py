"""Starting and stopping a server, without Ray: what it does to a cluster that is not its own."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cascade.cli.serve import console
from cascade.errors import ConfigError, ModelError
from cascade.settings.config import CascadeConfig
from cascade.settings.router import ListenConfig
from deployments.app import shortage
from deployments.ops import launch as module
from deployments.ops.launch import Server
from tests import small
from tests.cli import run
from tests.waiting import wait_until


class Ray:
    """Remembers what is asked of Ray and of Serve, on a machine whose address is 10.0.0.2."""

    def __init__(self) -> None:
        self.initialized = False
        self.calls: list[str] = []
        self.applications: list[str] = []
        self.raises: dict[str, BaseException] = {}  # by call
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.2")

    def is_initialized(self) -> bool:
        return self.initialized

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def status(self) -> Any:
        return SimpleNamespace(applications=dict.fromkeys(self.applications))

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> None:
            self.calls.append(name)
            if name in self.raises:
                raise self.raises[name]
            self.initialized = name != "shutdown"

        return call


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Ray:
    """In the place of Ray and Serve, which get no application; there is no cluster to join unless a test says so."""
    fake = Ray()
    monkeypatch.setenv("RAY_ADDRESS", "")
    for name, stub in {"ray": fake, "serve": fake, "verified": lambda config: {}, "bind": lambda *args: None}.items():
        monkeypatch.setattr(module, name, stub)
    return fake


@pytest.mark.parametrize(
    ("address", "initialized", "owned"),
    [("", False, True), ("local", False, True), ("ray://10.0.0.1:10001", False, False), ("", True, False)],
)
def test_joined_clusters_keep_what_runs_there(
    monkeypatch: pytest.MonkeyPatch, fake: Ray, address: str, initialized: bool, owned: bool
) -> None:
    """Guards a shared cluster: a server that joined it shut down everybody's Serve, or replaced another's application."""
    fake.initialized = initialized
    monkeypatch.setenv("RAY_ADDRESS", address)
    with Server.start(port=0):
        assert fake.calls == ["init"] * (not initialized) + ["start", "run"]
        fake.calls.clear()
    assert fake.calls == (["delete", "shutdown"] if owned else ["delete"])
    if not owned:
        fake.applications = ["cascade"]
        fake.calls.clear()
        with pytest.raises(ConfigError, match="runs an application named 'cascade' already: choose another --name"):
            Server.start(port=0)
        assert not {"run", "delete", "shutdown"} & {*fake.calls}
        with Server.start(port=0, name="another"):
            assert fake.calls[-2:] == ["start", "run"]


def asking(engine: dict[str, Any] | None = None, accelerator: str | None = None, **deployment: Any) -> CascadeConfig:
    values = small.config().model_dump(mode="json")
    values["tiers"][-1] |= {"engine_kwargs": engine or {}, "accelerator_type": accelerator, "deployment_config": deployment}
    return CascadeConfig.parse(values)


def learning(**alignment: Any) -> CascadeConfig:
    values = small.config().model_dump(mode="json")
    return CascadeConfig.parse(values | {"alignment": {"folder": "/shared", "students": ["tiny"], **alignment}})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (asking(ray_actor_options={"num_gpus": 1}, num_replicas=3), "ask for 3 GPU (full 3)"),
        (asking(ray_actor_options={"num_cpus": 4}), "ask for 5 CPU (tiny 0.5, medium 0.5, full 4)"),
        (asking(autoscaling_config={"min_replicas": 4}), "ask for 5 CPU"),
        (asking(ray_actor_options={"resources": {"disk": 2}}), "ask for 2 disk (full 2)"),
        (asking({"engine": "vllm", "tensor_parallel_size": 2}, ray_actor_options={"num_gpus": 1}), "2 GPU (full 2)"),
        (asking(accelerator="H100"), "accelerator_type:H100 (full 0.001)"),
        (learning(num_workers=2, ray_actor_options={"num_gpus": 1}), "ask for 2 GPU (learner 2)"),
    ],
    ids=["gpus", "cpus", "autoscaled", "custom", "ranks", "accelerators", "learner"],
)
def test_what_is_not_there_is_said(config: CascadeConfig, words: str) -> None:
    """Guards machines without the GPUs of the configuration: Ray Serve waited for them without end and without a word."""
    assert words in str(shortage(config, {"CPU": 4.0, "GPU": 1.0, "accelerator_type:L4": 1.0}))
    assert shortage(config, {"CPU": 16.0, "GPU": 8.0, "disk": 2.0, "accelerator_type:H100": 1.0}) is None


@pytest.mark.parametrize("address", ["", "auto"])
def test_servers_do_not_wait_for_what_cannot_come(
    monkeypatch: pytest.MonkeyPatch, fake: Ray, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    """Guards the start: on this machine alone it ends with a sentence and leaves nothing; a cluster may grow, so it goes on."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    config = asking(ray_actor_options={"num_gpus": 2})
    if address:
        with Server.start(config, port=0):
            assert "The tiers ask for 2 GPU (full 2) and Ray has 0 of it" in caplog.text
        return
    with pytest.raises(ConfigError, match="The tiers ask for 2 GPU"):
        Server.start(config, port=0)
    assert fake.calls == ["init", "shutdown"]


def test_failed_replicas_are_one_sentence(fake: Ray) -> None:
    """Guards the command line against the traceback of a replica that cannot start: its last line is what is wrong."""
    message = "Deploying failed. Error:\nTraceback\n  File x\ncascade.errors.ModelError: the model cannot be used: why\n"
    fake.raises["run"] = RuntimeError(message)
    with pytest.raises(ModelError, match=r"^The tiers did not start: the model cannot be used: why$"):
        Server.start(port=0)
    assert fake.calls[-1] == "shutdown"


def test_clusters_that_cannot_be_joined_are_named(monkeypatch: pytest.MonkeyPatch, fake: Ray) -> None:
    """Guards RAY_ADDRESS where no Ray runs: Ray tried for minutes and filled the screen, or showed a traceback."""
    address = f"127.0.0.1:{module.free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS is '{address}', where no cluster answers"):
        Server.start(port=0)
    assert fake.calls == []
    fake.raises["init"] = ConnectionError("Could not find any running Ray instance.\nPlease specify the one to connect to.")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS is 'auto', which cannot be joined \(Could not find any") as caught:
        Server.start(port=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("", ""), ("RAY_AUTH_MODE", "disabled")])
def test_no_token_is_left_behind(monkeypatch: pytest.MonkeyPatch, fake: Ray, tmp_path: Path, name: str, value: str) -> None:
    """Guards the user's machine: Ray wrote ~/.ray/auth_token, after which `ray start --head` refused workers without it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    if name:
        monkeypatch.setenv(name, value)
    with Server.start(port=0):
        assert ("RAY_AUTH_TOKEN" in os.environ) is (not name)  # else Ray makes a file, or the user has said what to do


def test_ctrl_c_ends_a_start_in_order(fake: Ray) -> None:
    """Guards who stops a server as soon as it answers: it said "Aborted!" and ended with code 1 until all tiers were there."""
    fake.raises["run"] = KeyboardInterrupt()
    assert run("serve", "--port", "0")[0] == 0
    assert fake.calls == ["init", "start", "run", "delete", "shutdown"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_server_in_order(monkeypatch: pytest.MonkeyPatch, fake: Ray, number: signal.Signals) -> None:
    """Guards answers and Ray's processes when a terminal is closed: that killed the server, whose last line nobody can see."""

    def status(line: str) -> Any:
        if "Shutting" in line:
            os.kill(os.getpid(), signal.SIGHUP)  # once more
            raise OSError(errno.EIO, "Input/output error")
        return contextlib.nullcontext(SimpleNamespace(update=print))

    def send() -> None:
        wait_until(lambda: signal.getsignal(number) is not signal.SIG_DFL)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(console, "status", status)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=send).start()
        assert run("serve", "--port", "0")[0] == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert fake.calls == ["init", "start", "run", "delete", "shutdown"]


def test_a_key_goes_where_routers_look_for_it(monkeypatch: pytest.MonkeyPatch, fake: Ray, tmp_path: Path) -> None:
    """Guards `--api-key` beside a file with a `keys_env` of its own: the key was nowhere, and everybody might ask."""
    values, path = small.config().model_dump(mode="json"), tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(values | {"router": {"access": {"keys_env": "MY_KEYS"}}}))
    monkeypatch.setenv("MY_KEYS", "")
    fake.raises["run"] = KeyboardInterrupt()
    command = ["serve", path, "--port", "0", "--api-key", "0123456789abcdef"]
    assert run(*command)[0] == 0
    assert os.environ["MY_KEYS"] == "cli=0123456789abcdef"
    code, output = run(*command)
    assert (code, "--api-key is given, and MY_KEYS has keys: give only one of them" in output) == (1, True)


@pytest.mark.parametrize(("name", "option"), [("grpc_port", "--grpc-port"), ("http_port", "--port")])
def test_a_port_that_is_taken_names_its_option(name: str, option: str) -> None:
    """Guards against "choose another port", where --port is not the one."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        given = ListenConfig.model_validate({name: holder.getsockname()[1]})
        with pytest.raises(ConfigError, match=f"cannot be used .*: choose another {option} or --host"):
            module.listening(given, None, *((0, given.grpc_port) if name == "grpc_port" else (None, 0)))


@pytest.mark.parametrize(("module", "on_path"), [("deployments.py", False), ("deployments/__init__.py", True)])
def test_another_package_of_our_name_is_refused(tmp_path: Path, module: str, on_path: bool) -> None:
    """Guards a user's folder `deployments`, which hid ours from the command or from Ray's processes: a traceback there."""
    other, data = tmp_path / "other" / module, tmp_path / "data"
    other.parent.mkdir(parents=True)
    other.write_text("")
    (data / "deployments").mkdir(parents=True)  # which hides nothing
    paths = [str(tmp_path / "other")] * on_path + [os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-c", "from cascade.cli.main import main; main()", "check", "wrong.yaml"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    place = data if on_path else tmp_path / "other"
    result = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert "hides cascade's own package 'deployments': rename it" in result.stderr
    assert "Traceback" not in result.stderr
    if on_path:
        result = subprocess.run(command, cwd=data, capture_output=True, text=True)
        assert "wrong.yaml cannot be read" in result.stderr


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_wrong_file_is_told_before_anything_slow_is_imported(tmp_path: Path, command: str) -> None:
    """Guards `cascade check` and `serve` of a file that is mended again and again: each try took the imports of a server."""
    (tmp_path / "wrong.yaml").write_text("tiers: [{name: full, model_loading_config: {modl_id: x}}]")
    code = (
        "import sys; from tests.cli import run; code, shown = run(sys.argv[1], sys.argv[2]); "
        "print(code, shown, sorted({'torch', 'transformers', 'ray', 'huggingface_hub', 'deployments'} & sys.modules.keys()))"
    )
    arguments = [sys.executable, "-c", code, command, str(tmp_path / "wrong.yaml")]
    printed = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    assert "model_id" in printed, printed
    assert printed.startswith("1 "), printed
    assert printed.rstrip().endswith("[]"), printed
