"""Every example runs, against a whole server in this process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doors import House, serving

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = "example-0123456789abcdef"
WORDS = {
    "openai_client.py": "",
    "tools.py": "get_weather {",
    "grpc_client.py": "tokens per full pass",
    "grpc_chat.py": "get_weather {",
    "reflection.py": '"finish"',
    "curl.sh": "data: [DONE]",
}


served = serving(env={"EXAMPLE_KEYS": f"examples={KEY}"}, access={"keys_env": "EXAMPLE_KEYS"})


def test_all_examples_are_tested() -> None:
    """Guards against examples that nobody runs."""
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")} == set(WORDS)


@pytest.mark.parametrize("name", WORDS)
def test_example_runs(served: House, name: str) -> None:
    """Guards newcomers: what the examples say works, with a key."""
    if name == "reflection.py":
        pytest.importorskip("grpc_reflection")
    if name.endswith(".sh") and shutil.which("curl") is None:
        pytest.skip("needs curl")
    shell = "sh" if name.endswith(".sh") else sys.executable
    address = served.url if name in ("openai_client.py", "tools.py", "curl.sh") else served.grpc
    environment = os.environ | {"CASCADE_API_KEY": KEY}
    done = subprocess.run(
        [shell, str(EXAMPLES / name), address], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert WORDS[name] in done.stdout
    assert done.stdout.strip()
