"""Replicas on CPUs as forks of one process that has imported PyTorch and Transformers: imports are most of a server's start.

Ray starts each worker through its ``py_executable``, which is this file run as a script: it hands its arguments, environment
and streams to the fork server and is gone. Ray itself is never imported before a fork, since its threads do not survive one.
"""

import contextlib
import gc
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

SOCKET = "requests"
FORKED = b"f"
SERVE = "import sys; from deployments.launch.fork_server import serve; serve(int(sys.argv[1]), sys.argv[2])"


class ForkServer:
    """A process that forks workers until it is closed, or its owner dies. Linux only."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it, with ``environment`` above this process's own; it imports while this process goes on."""
        folder = tempfile.mkdtemp(prefix="cascade-")  # nobody else may enter: who connects runs code
        path = f"{folder}/{SOCKET}"
        modules = os.pathsep.join(filter(None, sys.path))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(listener.fileno()), folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env={**os.environ, **environment, "PYTHONPATH": modules},
                process_group=0,  # Ctrl-C is for the owner, who ends workers in order; of sessions see `_become`
            )
        self._folder = folder
        self.py_executable = shlex.join([sys.executable, "-I", "-S", __file__, path])

    def close(self) -> None:
        """Fork no more. Workers that were forked are Ray's and go on."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def serve(listening: int, folder: str) -> None:
    """Import everything but Ray, then fork for each request on the socket ``listening`` until standard input ends."""
    import fastapi  # noqa: F401
    import grpc  # noqa: F401

    import cascade.local  # noqa: F401

    gc.freeze()  # no fork need look at what was imported when it collects garbage
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave no zombies
    with socket.socket(fileno=listening) as listener:
        request = _next_fork(listener)
    if request is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _become(**request)


def _next_fork(listener: socket.socket) -> dict[str, Any] | None:
    """In a fork the request that it is for; in the server ``None``, at its end."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, ValueError):  # who asked has died
            request = _read(connection)
            if os.fork() == 0:
                return request
            for stream in request["streams"]:
                os.close(stream)
            connection.sendall(FORKED)


def _read(connection: socket.socket) -> dict[str, Any]:
    """What `_ask` sent."""
    first, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as rest:
        return {**json.loads(first + rest.read()), "streams": streams}


def _become(arguments: Sequence[str], environment: Mapping[str, str], folder: str, streams: Sequence[int]) -> None:
    """Go on as Python would that was started so."""
    # Ray ends the whole process group of a worker that died: no other fork may be in it. Not a session of its own: Linux shares
    # processors among sessions (autogroup), and one whose tiers fill them kept others from running for 100 ms
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = list(arguments)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _ask(path: str, arguments: Sequence[str]) -> bool:
    """Whether the fork server at ``path`` goes on in this process's place."""
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        content = json.dumps(request).encode()
        socket.send_fds(connection, [content[:1]], [0, 1, 2])
        connection.sendall(content[1:])
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(1) == FORKED
    return False


if __name__ == "__main__":
    if not _ask(sys.argv[1], sys.argv[2:]):  # it is gone: a worker that imports for itself
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
