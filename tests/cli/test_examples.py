"""Every example runs, against a whole server in this process."""

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.in_process import House, serving
from tests.waiting import LONG_S

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = "example-0123456789abcdef"
WORDS = {
    "openai_client.py": "",
    "tools.py": "get_weather {",
    "grpc_client.py": "tokens per full pass",
    "curl.sh": "data: [DONE]",
}


served = serving(env={"EXAMPLE_KEYS": f"examples={KEY}"}, access={"keys_env": "EXAMPLE_KEYS"})


def test_all_examples_are_tested() -> None:
    """Guards against examples that nobody runs."""
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")} == set(WORDS)


@pytest.mark.parametrize("name", WORDS)
def test_example_runs(served: House, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards newcomers: what the examples say works, with a key."""
    monkeypatch.setenv("CASCADE_API_KEY", KEY)
    command = [str(EXAMPLES / name), served.grpc if name == "grpc_client.py" else served.url]
    if name.endswith(".py"):
        monkeypatch.setattr("sys.argv", command)
        runpy.run_path(command[0])
    elif shutil.which("curl") is None:
        pytest.skip("needs curl")
    else:
        subprocess.run(["sh", *command], timeout=LONG_S, check=True)
    printed = capfd.readouterr().out
    assert printed.strip()
    assert WORDS[name] in printed
