"""What the process of one tier does: loads its model, serves its sessions, and ends with the process that started it.

Over one pair of sockets goes a `TierSpec` down; ``None`` up when the weights are there; ``None`` down when the tier may measure
memory and time its passes, which others that load would disturb; `Facts` up. An exception up instead of either is why the tier
cannot be served. Then orders go down, of which `Look` is answered with a `Status`.
"""

import gc
import os
import pickle
import select
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, TypeAlias

from cascade.chain.policy import Policy
from cascade.chain.profile import Profile, glance
from cascade.chain.runner import TierStats
from cascade.chain.tier import Tier
from cascade.drafters import DrafterSpec, make
from cascade.engine.grammar import Grammars
from cascade.engine.loading import load
from cascade.engine.model import Model
from cascade.engine.sequence_state import state_maker
from cascade.engine.threads import apart
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import ModelError
from cascade.processes.links import Downlink, Uplink


@dataclass(frozen=True, slots=True)
class TierSpec:
    """The tier that a process serves."""

    name: str
    level: int
    bottom: bool  # nobody is below it
    source: str
    tokenizer: str  # source of the one whose token ids grammars mean: the full tier's
    policy: Policy
    drafters: tuple[DrafterSpec, ...]  # inside it, as inside all tiers, the first ones by level
    options: Mapping[str, Any]  # of `cascade.engine.loading.load`


@dataclass(frozen=True, slots=True)
class Facts:
    """What the model takes."""

    vocab_size: int
    context_len: int


@dataclass(frozen=True, slots=True)
class Status:
    """What goes on."""

    num_sessions: int
    stats: TierStats


@dataclass(frozen=True, slots=True)
class AttachBelow:
    """The tier ``name`` is reached through the socket that follows."""

    name: str


@dataclass(frozen=True, slots=True)
class AttachAbove:
    """A tier above reaches this one through the socket that follows."""


@dataclass(frozen=True, slots=True)
class Look:
    """Tell your `Status`."""


Order: TypeAlias = AttachBelow | AttachAbove | Look


def main(descriptor: int, parent: int) -> None:
    """Serve the one who holds the other end of the socket ``descriptor``: the process ``parent``."""
    threading.Thread(target=_follow, args=(descriptor, parent), name="follows", daemon=True).start()
    control = Connection(descriptor)
    with suppress(EOFError, OSError):  # the parent has gone
        served = _load(control)
        while served is not None:
            served.obey(control.recv(), control)
    os._exit(0)  # nothing to save; a pass that runs may take long


def _follow(descriptor: int, parent: int) -> None:
    """End with the parent, whatever else goes on here. Others may hold its end of the socket: processes that it has forked."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is always told
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):
            poll.register(os.pidfd_open(parent), select.POLLIN)
        if os.getppid() != parent:  # it was gone before
            os._exit(0)
    poll.poll()
    os._exit(0)


def _load(control: Connection) -> "Served | None":
    """The tier, once it may be used; ``None`` if it cannot be served."""
    spec: TierSpec = control.recv()
    try:
        network = apart(partial(load, spec.source, **spec.options))
        tokenizer = Tokenizer.from_pretrained(spec.tokenizer, trust_remote_code=spec.options["trust_remote_code"])
        _wait_for_turn(control)
        model = apart(partial(Model, network))
        profile = apart(partial(glance, model))
    except Exception as error:
        control.send(_portable(error, spec))
        return None
    served = Served(spec, model, tokenizer, profile)
    gc.freeze()  # what is there by now stays: no collection need look at it
    control.send(Facts(model.vocab_size, model.context_len))
    return served


def _wait_for_turn(control: Connection) -> None:
    """The weights are there."""
    try:
        control.send(None)
        control.recv()
    except (EOFError, OSError):
        raise SystemExit from None  # the parent has gone


def _portable(error: Exception, spec: TierSpec) -> Exception:
    """The error itself, if it survives the way up."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ModelError(f"Tier {spec.name} cannot be served ({type(error).__name__}: {error})")
    return error


class Served:
    """A tier and its links."""

    def __init__(self, spec: TierSpec, model: Model, tokenizer: Tokenizer, profile: Profile) -> None:
        new_state = state_maker(Grammars(tokenizer).matcher)
        drafters = make(spec.drafters, [one.kind for one in spec.drafters], tokenizer.encode_part)
        options: dict[str, Any] = {"policy": spec.policy, "profile": profile, "new_state": new_state, "drafters": drafters}
        self._tier = Tier(spec.name, spec.level, model, **options)
        self._below = Downlink(self._tier.post)
        self._tier.below = None if spec.bottom else self._below
        self._tier.start()

    def obey(self, order: Order, control: Connection) -> None:
        """Do what the parent asks."""
        match order:
            case AttachBelow(name):
                self._below.attach(name, _receive_socket(control))
            case AttachAbove():
                Uplink(_receive_socket(control), self._tier, ended=lambda _: None)
            case Look():
                control.send(Status(self._tier.num_sessions, self._tier.snapshot()))


def _receive_socket(control: Connection) -> socket.socket:
    return socket.socket(fileno=recv_handle(control))
