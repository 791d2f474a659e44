"""Lets replicas of all nodes start as forks of one process: a fork of the fork server enters a host, and forks there.

Run as a script by a fork server, with the process whose host is to be entered and the path of the socket there.
"""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

from deployments.launch import fork_server


def enter(pid: int) -> None:
    """Go on as a process of the host that ``pid`` is of."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    places = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "pid", "mnt")]
    for place in places:
        if setns(place, 0):
            raise OSError(ctypes.get_errno(), f"the host of process {pid} cannot be entered")
        os.close(place)
    if os.fork():  # a process stays with its processes, its children do not
        os._exit(0)
    os.chdir("/")


def serve(place: str) -> None:
    """Fork for each request on the socket at ``place`` until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        Path(place).unlink(missing_ok=True)  # of a host that was killed
        listener.bind(place)
        listener.listen(64)
        request = fork_server._next_fork(listener)
    if request is not None:
        fork_server._become(**request)


if __name__ == "__main__":
    enter(int(sys.argv[1]))
    serve(sys.argv[2])
