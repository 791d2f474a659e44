"""What a tier's loop takes beside its model: a model that takes no time, and many sessions. The last line is JSON.

A tier with its sessions, its packing and the codec of its links runs as it is served. Whoever is above and below it answers at
once, and what they take is left out. The *gap* lies between the end of a pass and the start of the next: all that a device
would wait for. The *rest* runs while the model works. Both are times of the tier's thread on its core, which other programs of
the machine do not lengthen.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.document import console, finish, parsed, parser, stamp
from cascade.cpu.cache import Packed
from cascade.draft import Draft
from cascade.drafters import make, specs
from cascade.engine.sampling.own_tokens import choices
from cascade.messages import Commit, Link, Message, Open, Proposal, SessionSpec
from cascade.params import SamplingParams
from cascade.planner.cost import Profile
from cascade.scorer import MAX_FORKED, Row, Scored
from cascade.splitmix import mix
from cascade.tier.tier import Tier
from cascade.v1 import link_pb2 as pb
from deployments.links.codec import decode, encode

SESSIONS = (1, 8, 32, 64, 128)
WARM_UP = 24  # passes: the drafters inside have seen a period of each text by then
PASSES = 200
QUICK_PASSES = 20
VOCAB, PERIOD, ODD = 4096, 24, 7  # a text repeats itself, but for one token in seven
PROMPT, MAX_TOKENS, WINDOW = 2 * PERIOD, 1 << 16, 1024
AHEAD = 32  # tokens that the tier below has guessed: twice what a pass scores
PASS_S = ((1, 0.0065), (64, 0.007), (512, 0.012))  # what passes are said to cost: an 8B model on an H100
MODEL = "a model that takes no time"
SETUPS = ("alone", "suffix", "below")


def own_token(seed: int, position: int) -> int:
    """The own token at a position of a text."""
    odd = mix(seed << 32 | position)
    return odd % VOCAB if odd % ODD == 0 else mix(seed << 32 | position % PERIOD) % VOCAB


@dataclass
class Clock:
    """When passes began and ended, and how long somebody else than the tier has worked; in seconds."""

    aside_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    rests_s: list[float] = field(default_factory=list)
    _since: float = 0.0
    _aside_then: float = 0.0

    def lap(self, times: list[float]) -> None:
        """Keep the time since the last call."""
        now = time.thread_time()
        times.append(now - self._since - (self.aside_s - self._aside_then))
        self._since, self._aside_then = now, self.aside_s


class Keys:
    """Keys and values of nobody."""

    block = 16

    def reserve(self, positions: int) -> None: ...

    def reuse(self, source: "Keys", positions: int) -> None: ...

    def fork(self, position: int) -> "Keys":
        return Keys()

    def join(self, fork: "Keys") -> None: ...

    def free(self) -> None: ...


class NullModel:
    """Packs rows as real models do, and knows their own tokens."""

    vocab_size = VOCAB
    context_len = PROMPT + MAX_TOKENS + MAX_FORKED
    cache_tokens = 1 << 24

    def __init__(self, clock: Clock, passes: int) -> None:
        self._clock = clock
        self._left = WARM_UP + passes
        self.done = threading.Event()

    def new_cache(self) -> Keys:
        return Keys()

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        Packed.of(rows)
        choices(rows)
        self._clock.lap(self._clock.gaps_s)
        return rows

    def collect(self, rows: Sequence[Row]) -> list[Scored]:
        self._clock.lap(self._clock.rests_s)
        scored = [Scored(self._own(row)) for row in rows]
        self._left -= 1
        if not self._left:
            self.done.set()
        self._clock.lap([])
        return scored

    def _own(self, row: Row) -> list[int]:
        seed, end = row.params.seed or 0, row.start + len(row.tokens)
        own = [own_token(seed, end + place) for place in range(1 - row.num_own, 1)]
        return [*own, *(own_token(seed, end + 1 + depth) for depth in row.draft.depths)]


class Neighbour(Link):
    """The tier or router at the other end of a link: ``answer`` says what it makes of a message. All goes over the wire."""

    def __init__(self, clock: Clock, tier: Tier, answer: Callable[[Message], Message | None]) -> None:
        self._clock = clock
        self._tier = tier
        self._answer = answer

    def send(self, messages: Sequence[Message]) -> None:
        encode(messages).SerializeToString()
        begin = time.thread_time()
        answers = [answer for message in messages if (answer := self._answer(message)) is not None]
        sent = encode(answers).SerializeToString()
        self._clock.aside_s += time.thread_time() - begin
        if answers:
            self._tier.post(decode(pb.Batch.FromString(sent)))


@dataclass
class Router:
    """Commits the whole of what it is sent."""

    committed: dict[str, int] = field(default_factory=dict)  # positions, by session

    def answer(self, message: Message) -> Message | None:
        if not isinstance(message, Proposal):  # it has failed, since the tier is closed
            return None
        end_before = self.committed.get(message.session, message.start)
        end = message.start + len(message.draft)
        self.committed[message.session] = max(end_before, end)
        new = message.draft.tokens[end_before - message.start :]
        return Commit(message.session, end_before, new) if new else None


@dataclass
class Drafter:
    """A tier below that is always `AHEAD`, and wrong where its verifier's text does not repeat itself."""

    seeds: dict[str, int] = field(default_factory=dict)  # by session

    def answer(self, message: Message) -> Message | None:
        if isinstance(message, Open):
            self.seeds[message.session] = message.spec.params.seed or 0
        elif not isinstance(message, Commit):
            return None
        seed = self.seeds[message.session]
        end = len(message.spec.tokens) if isinstance(message, Open) else message.start + len(message.tokens)
        tokens = tuple(mix(seed << 32 | position % PERIOD) % VOCAB for position in range(end, end + AHEAD))
        return Proposal(message.session, end, Draft(tokens, bytes(AHEAD), bytes([16]) * AHEAD))


def measure(setup: str, sessions: int, passes: int) -> dict[str, float]:
    """Milliseconds of the gap and of the rest of a pass, medians."""
    clock = Clock()
    model = NullModel(clock, passes)
    drafters = make(specs("suffix"), ["suffix", "full"], None) if setup == "suffix" else []
    tier = Tier("full", 1, model, profile=Profile(PASS_S), drafters=drafters)
    if setup == "below":
        tier.below = Neighbour(clock, tier, Drafter().answer)
    up = Neighbour(clock, tier, Router().answer)
    openings = [
        Open(
            f"session-{seed}",
            SessionSpec(
                tokens=tuple(own_token(seed, position) for position in range(PROMPT)),
                prompt_len=PROMPT,
                params=SamplingParams(max_tokens=MAX_TOKENS, temperature=0, seed=seed),
                tier="full",
                chain=("tiny",) if setup == "below" else (),
                window=WINDOW,
                draft_window=AHEAD,
                drafters=("suffix",) if setup == "suffix" else (),
            ),
        )
        for seed in range(sessions)
    ]
    tier.post(openings, up)
    tier.start()
    if not model.done.wait(600):
        raise SystemExit(f"{sessions} sessions {setup} did not make {passes} passes")
    tier.close()
    return {"gap_ms": _ms(clock.gaps_s, passes), "rest_ms": _ms(clock.rests_s, passes)}


def _ms(times: Sequence[float], passes: int) -> float:
    return round(median(times[WARM_UP : WARM_UP + passes]) * 1e3, 3)


def main(arguments: Sequence[str] | None = None) -> None:
    about = "What a tier's loop takes beside a model that takes no time, by the number of its sessions."
    chosen = parsed(parser("loop", about, SETUPS), arguments)
    passes = QUICK_PASSES if chosen.quick else PASSES
    line: dict[str, Any] = {"gap_ms": {}, "rest_ms": {}}
    for setup in chosen.only or SETUPS:
        figures = {str(sessions): measure(setup, sessions, passes) for sessions in SESSIONS}
        console.print(setup, figures)
        for name, of_setup in line.items():
            of_setup[setup] = {sessions: took[name] for sessions, took in figures.items()}
    finish(line | {"model": MODEL} | stamp(MODEL), line, chosen.results)


if __name__ == "__main__":
    main()
