"""Starting and stopping a server, without Ray: what it does to a cluster that is not its own."""

from typing import Any

import pytest

from deployments import server as module
from deployments.server import Server


class Ray:
    """Remembers what is asked of Ray and of Serve."""

    def __init__(self, initialized: bool) -> None:
        self.initialized = initialized
        self.calls: list[str] = []

    def is_initialized(self) -> bool:
        return self.initialized

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> None:
            self.calls.append(name)
            self.initialized = name != "shutdown"

        return call


@pytest.mark.parametrize(
    ("address", "initialized", "owned"),
    [("", False, True), ("local", False, True), ("10.0.0.1:6379", False, False), ("", True, False), ("auto", True, False)],
)
def test_joined_clusters_keep_their_applications(
    monkeypatch: pytest.MonkeyPatch, address: str, initialized: bool, owned: bool
) -> None:
    """Guards a shared cluster: stopping a server that joined it must not shut down everybody's Serve."""
    fake = Ray(initialized)
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(module, "serve", fake)
    monkeypatch.setattr(module, "build", lambda config: None)
    monkeypatch.setattr(module, "_node", lambda: "10.0.0.2")
    with Server.start(port=0):
        assert fake.calls == ["init"] * (not initialized) + ["start", "run"]
        fake.calls.clear()
    assert fake.calls == (["delete", "shutdown"] if owned else ["delete"])
