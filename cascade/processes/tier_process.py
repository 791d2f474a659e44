"""The process of one tier, as the process that started it sees it: begun, asked, begun again when it dies, ended."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from cascade.errors import ModelError
from cascade.processes.child import AttachAbove, AttachBelow, Facts, Look, Status, TierSpec

log = logging.getLogger(__name__)

# not by `multiprocessing`, which imports the caller's script once more, nor by a plain fork, which PyTorch does not survive
COMMAND = "import sys; from cascade.processes.child import main; main(int(sys.argv[1]), int(sys.argv[2]))"
FIRST_BACKOFF_S = 1.0  # before a process that has died is started again
MAX_BACKOFF_S = 60.0
STEADY_S = 60.0  # a process that has lived so long dies for another reason than those before
LOOK_S = 5.0  # for an answer to `Look`
DIED = "The process of tier %s has died (%s): drafts go on without it, and it starts again in %g s"


class TierProcess:
    """Starts at once, and loads; `wait_for_weights` and `wait_until_ready` say when, and raise what was raised there.

    From then on a thread watches it, starts it again when it has died, and calls ``returned`` when that is ready.
    """

    def __init__(self, spec: TierSpec, *, num_threads: int, returned: Callable[["TierProcess"], object]) -> None:
        self.spec = spec
        self.facts = Facts(0, 0)  # known when it is ready
        self.ready = False  # it takes orders
        self._num_threads = num_threads
        self._returned = returned
        self._lock = threading.RLock()  # of orders, and of being closed
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._supervise, name=f"watches-{spec.name}", daemon=True)
        self._process, self._control = self._begin()

    @property
    def pid(self) -> int:
        """Of the process that serves the tier, or did last."""
        return self._process.pid

    def wait_for_weights(self) -> None:
        """Return when its weights are in memory."""
        self._receive()

    def wait_until_ready(self) -> None:
        """Let it time passes, and return when it serves."""
        with suppress(OSError):  # it has died: the next line says so
            self._control.send(None)
        self.facts = self._receive()
        self.ready = True

    def watch(self) -> None:
        """Keep it alive from now on."""
        self._watch.start()

    def attach_below(self, name: str, end: socket.socket) -> None:
        """Let it reach the tier ``name`` through ``end``, which goes there."""
        self._hand_over(AttachBelow(name), end)

    def attach_above(self, end: socket.socket) -> None:
        """Let it be reached through ``end``, which goes there."""
        self._hand_over(AttachAbove(), end)

    def status(self) -> Status | None:
        """What goes on there; ``None`` while nobody answers."""
        with self._lock, suppress(OSError, EOFError):
            while self._control.poll():
                self._control.recv()  # an answer that came too late
            if self.ready:
                self._control.send(Look())
                if self._control.poll(LOOK_S):
                    answer: Status = self._control.recv()
                    return answer
        return None

    def close(self) -> None:
        """End it, whatever it does: it has nothing to save."""
        self._closing.set()
        with self._lock:
            self.ready = False
            self._process.kill()
        if self._watch.is_alive():
            self._watch.join()
        self._process.wait()
        self._control.close()

    def _begin(self) -> tuple["subprocess.Popen[bytes]", Connection]:
        """A new process, which loads."""
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with ours, theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(self._num_threads)},
                process_group=0,  # Ctrl-C is for the parent
            )
            control = Connection(ours.detach())
        control.send(self.spec)
        return process, control

    def _receive(self) -> Any:
        """What it says next; raises that if it is an error."""
        try:
            said = self._control.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            raise ModelError(f"The process of tier {self.spec.name} ended before it could serve ({_end_of(code)})") from None
        if isinstance(said, BaseException):
            raise said
        return said

    def _hand_over(self, order: AttachBelow | AttachAbove, end: socket.socket) -> None:
        with end, self._lock, suppress(OSError):  # it has died, and gets another one when it is back
            self._control.send(order)
            send_handle(self._control, end.fileno(), self._process.pid)

    def _supervise(self) -> None:
        """Start it again whenever it has died."""
        backoff_s, began, reason = FIRST_BACKOFF_S, time.monotonic(), ""
        while True:
            code = self._process.wait()
            self.ready = False
            if self._closing.is_set():
                return
            if time.monotonic() - began > STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            log.warning(DIED, self.spec.name, reason or _end_of(code), backoff_s)
            if self._closing.wait(backoff_s):
                return
            backoff_s, began = min(MAX_BACKOFF_S, 2 * backoff_s), time.monotonic()
            reason = self._begin_again()

    def _begin_again(self) -> str:
        """Why that did not work."""
        try:
            with self._lock:
                if self._closing.is_set():
                    return ""
                self._control.close()
                self._process, self._control = self._begin()
            self.wait_for_weights()
            self.wait_until_ready()
        except Exception as error:  # as at the first start, or because it has died again
            return str(error)
        self._returned(self)
        return ""


def _end_of(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
