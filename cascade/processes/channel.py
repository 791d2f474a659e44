"""Batches of messages both ways between two processes of this machine, over a pair of connected sockets."""

import contextlib
import logging
import pickle
import socket
import threading
from collections.abc import Callable, Sequence

from cascade.messages import Message

log = logging.getLogger(__name__)

READ_BYTES = 1 << 16  # at once


class Channel:
    """One end of a pair. Pickles are read, so whoever holds the other end must be trusted: it is a process of ours.

    ``hear`` gets what the other end sends, batch by batch, and ``ended`` is called once, when it is gone or this one is closed;
    both in a thread of the channel, which `start` begins.
    """

    def __init__(
        self, sock: socket.socket, hear: Callable[[Sequence[Message]], object], ended: Callable[[], object], name: str = ""
    ) -> None:
        self._sock = sock
        self._hear = hear
        self._ended = ended
        self._lock = threading.Lock()
        self._waiting = b""  # what the socket has no room for yet
        self._reader = threading.Thread(target=self._read, name=f"reads-{name}", daemon=True)
        self._writer: threading.Thread | None = None  # while something waits

    def start(self) -> None:
        """Begin to read."""
        self._reader.start()

    def send(self, messages: Sequence[Message]) -> None:
        """Write a batch, or let a thread do so if the socket is full: never waits. It is lost if the other end is gone."""
        data = pickle.dumps(list(messages), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if self._writer is not None:
                self._waiting += data
                return
            self._waiting = data[self._write(data) :]
            if self._waiting:
                self._writer = threading.Thread(target=self._drain, name="writes", daemon=True)
                self._writer.start()

    def close(self) -> None:
        """Hang up: the other end hears so at once, and so does ``ended``; from any thread."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._sock.shutdown(socket.SHUT_RDWR)
        for thread in (self._reader, self._writer):
            if thread is not None and thread.is_alive() and thread is not threading.current_thread():
                thread.join()

    def _write(self, data: bytes) -> int:
        """Bytes that are out of hand: all of them if nobody reads any more."""
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _drain(self) -> None:
        """Write what waits, and end."""
        while True:
            with self._lock:
                data, self._waiting = self._waiting, b""
                if not data:
                    self._writer = None
                    return
            with contextlib.suppress(OSError):  # the other end is gone
                self._sock.sendall(data)

    def _read(self) -> None:
        try:
            with self._sock.makefile("rb", READ_BYTES) as file:
                while True:
                    self._hear(pickle.load(file))
        except (EOFError, OSError, pickle.UnpicklingError):  # between two batches, or amid one
            pass
        except Exception:
            log.exception("The link of %s broke", self._reader.name)
        finally:
            self._sock.close()
            self._ended()
