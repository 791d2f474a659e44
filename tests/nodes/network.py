"""Hosts that are not there: namespaces for network, mounts and processes, joined by a bridge that nobody else sees.

Whatever a host holds, processes, links and mounts, ends with its first process, and that one with ours: the kernel clears up.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

Environment = Mapping[str, str] | None

SUBNET = "10.77.0"  # seen inside alone
BRIDGE = "bridge"
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
NOBODY = "02:77:ff:ff:ff:ff"  # a place that no host has
# $1 is the host's own folder, $2 the path that it has on every host; the last line is there for the shell to outlive `cat`
FIRST = """set -e
ip link set lo up
mount --bind "$1" "$2"
mount -t tmpfs -o size=512m tmpfs /dev/shm
echo up
cat
exit 0
"""


class Host:
    def __init__(self, name: str, own: Path, shared: Path, number: int) -> None:
        """``own`` is a folder that processes of this host see at ``shared``; raises `OSError` if the kernel does not let us."""
        self.name = name
        self.address = f"{SUBNET}.{number}"
        self.mac = f"02:77:00:00:00:{number:02x}"
        self.pid = 0  # of its first process, once it is up
        self._handle = -1
        self._kept: list[subprocess.Popen[str]] = []
        self._first = subprocess.Popen(
            [*UNSHARE, "sh", "-c", FIRST, "sh", str(own), str(shared)],
            stdin=subprocess.PIPE,  # which closes when this process ends, however it ends
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output = self._first.stdout.readline().strip()
        if output != "up":
            output += self._first.stdout.read()
            self.kill()
            raise OSError(f"no namespaces can be had here: {' '.join(output.split())}")
        self.pid = next(child.pid for child in psutil.Process(self._first.pid).children() if child.name() == "sh")
        self._handle = os.pidfd_open(self.pid)

    def popen(self, command: Sequence[str], environment: Environment = None, **options: Any) -> "subprocess.Popen[str]":
        """Start ``command`` on this host, with ``environment`` above ours."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", "--"]
        return subprocess.Popen([*enter, *command], env={**os.environ, **(environment or {})}, text=True, **options)

    def keep(self, command: Sequence[str], environment: Environment = None) -> "subprocess.Popen[str]":
        """`popen` with pipes to its standard input and output, for as long as the host is there."""
        process = self.popen(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._kept.append(process)
        return process

    def run(self, command: Sequence[str], environment: Environment = None, timeout_s: float = 240.0) -> str:
        """What ``command`` wrote; raises `AssertionError` with all of it if it failed."""
        process = self.popen(command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        try:
            output, complained = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, complained = process.communicate()
            complained += f"\n(killed after {timeout_s:g} s)"
        assert process.returncode == 0, f"{' '.join(command)} on {self.name}: {output}\n{complained}"
        return output

    def ip(self, *words: str) -> None:
        command = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"ip {' '.join(words)} on {self.name}: {done.stderr.strip()}")

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Those that run here and whose title has these words."""
        processes = []
        place = os.readlink(f"/proc/{self.pid}/ns/pid")
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
                if os.readlink(f"/proc/{process.pid}/ns/pid") == place and title in " ".join(process.cmdline()):
                    processes.append(process)
        return processes

    def kill(self) -> None:
        """End all its processes at once, as ``kill -9`` does."""
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its number may be another's
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)
            self._handle = -1
        for process in (self._first, *self._kept):
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):  # what nobody has read
                        stream.close()


class Network:
    """Hosts on one bridge, which is a host itself: whatever runs there is a client from outside.

    ``shared`` is a path at which each host sees a folder of its own, `Network.folder`, until the network is closed.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self._ports: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._root = Path(tempfile.mkdtemp(prefix="nodes-"))  # short: paths of sockets have 107 characters at most
        self.shared = self._root / "own"
        self.shared.mkdir()
        try:
            self.outside = Host("outside", self.folder("outside"), self.shared, 254)
            self.outside.ip("link", "add", BRIDGE, "address", self.outside.mac, "type", "bridge")
            self.outside.ip("address", "add", f"{self.outside.address}/24", "dev", BRIDGE)
            self.outside.ip("link", "set", BRIDGE, "up")
        except BaseException:
            self.close()
            raise

    def folder(self, name: str) -> Path:
        """The folder of a host, as it is seen from here; it outlives the host."""
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        return folder

    def add(self, name: str, number: int) -> Host:
        """A host at `SUBNET`.``number``, in place of the one of that name."""
        self.remove(name)
        host = Host(name, self.folder(name), self.shared, number)
        self.hosts[name], port = host, f"port{next(self._numbers)}"
        self._ports[name] = port
        self.outside.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self.outside.ip("link", "set", port, "master", BRIDGE, "up")
        host.ip("link", "set", "eth0", "address", host.mac)
        host.ip("address", "add", f"{host.address}/24", "dev", "eth0")
        host.ip("link", "set", "eth0", "up")
        return host

    def remove(self, name: str, silently: bool = False) -> None:
        """Kill a host, if it is there; ``silently``: its peers hear nothing of it, as when a machine loses power."""
        host = self.hosts.pop(name, None)
        if host is None:
            return
        port = self._ports.pop(name)
        if silently:
            self.outside.ip("link", "set", port, "down")
        host.kill()
        with contextlib.suppress(OSError):  # it went with its host
            self.outside.ip("link", "delete", port)

    def cut(self, this: str, other: str) -> None:
        """Let nothing through between two hosts, either way, and say nothing; both go on to reach all others."""
        self._place(this, other, NOBODY)

    def heal(self, this: str, other: str) -> None:
        self._place(this, other)

    def _place(self, this: str, other: str, mac: str = "") -> None:
        for here, there in itertools.permutations((self.hosts[this], self.hosts[other])):
            here.ip("neighbour", "replace", there.address, "lladdr", mac or there.mac, "dev", "eth0", "nud", "permanent")

    def close(self) -> None:
        for name in list(self.hosts):
            self.remove(name)
        if hasattr(self, "outside"):
            self.outside.kill()
        shutil.rmtree(self._root, ignore_errors=True)


def obstacle() -> str | None:
    """Why there can be no such network here, found out by trying; ``None`` if there can."""
    try:
        with contextlib.closing(Network()) as network:
            network.add("probe", 1)
    except OSError as error:  # `unshare` or `ip` is not there, too
        return " ".join(str(error).split())
    return None
