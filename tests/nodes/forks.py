"""Lets replicas of all nodes start as forks of one process: a fork of the fork server becomes that of a host.

Run as a script by the fork server, with a process of the host that is to be entered and the path of the socket there.
"""

import ctypes
import os
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


def serve(place: Path) -> None:
    """Fork for each request on the socket at ``place`` until standard input ends."""
    place.parent.mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen(64)
    fork_server.serve(listener.detach(), str(place.parent))


if __name__ == "__main__":
    enter(int(sys.argv[1]))
    serve(Path(sys.argv[2]))
