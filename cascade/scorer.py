"""The interface between a tier and its model: rows of a pass go in, own tokens come out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from cascade.draft import NO_DRAFT, Draft
from cascade.messages import Logprobs
from cascade.params import SamplingParams

BLOCK = 16  # positions
TILE = 64  # positions that attention reads at once, see `cascade.engine.network.attention`
MAX_FORKED = 32  # positions of a fork, see `Store.fork`
UNIT = 1 / 16  # a gap of 1 on the wire, in nats
UNREAD = -1  # `Row.guesses` without a head
GROWTH = 16  # a full allocation grows by at least 1/16, so that little is copied, and little is reserved needlessly


def num_blocks(positions: int) -> int:
    """Blocks that hold ``positions``."""
    return -(-positions // BLOCK)


def tiled(positions: int) -> int:
    """``positions`` rounded up to whole tiles."""
    return -(-positions // TILE) * TILE


def grown_capacity(positions: int, capacity: int) -> int:
    """The new capacity, in positions, of a store of ``capacity`` that must hold ``positions``."""
    return BLOCK * max(num_blocks(positions), num_blocks(capacity + capacity // GROWTH))


class Store(Protocol):
    """Keys and values of one session at one tier; see `cascade.engine.network.attention.Cache`."""

    @property
    def block(self) -> int:
        """Positions that are reserved at once: a multiple of `BLOCK`."""

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` in total; contents stay."""

    def reuse(self, source: Any, positions: int) -> None:
        """Take the first ``positions`` of another store of the same model; there is room for them."""

    def fork(self, position: int) -> Any:
        """A store that shares the positions before ``position``, and has its own, still empty, from there on.

        Rows over a fork start at ``position`` or after, and end at most `MAX_FORKED` positions after it. Neither store sees
        what the other one writes from ``position`` on, even in the same pass. A write before ``position`` voids the fork.
        """

    def join(self, fork: Any) -> None:
        """Take over the contents of ``fork``, a fork of this store, and free it."""

    def free(self) -> None:
        """Give the memory back; the store is not used again."""


class RowState(Protocol):
    """What own tokens of a session depend on besides logits; see `cascade.engine.sampling.state`."""

    prompt_len: int

    @property
    def prompt_logprobs(self) -> tuple[Logprobs, ...]:
        """Log-probabilities of the prompt's tokens but the first, as far as they are scored."""

    def logprobs(self, start: int, num_tokens: int) -> tuple[Logprobs, ...]:
        """Log-probabilities of ``num_tokens`` own tokens from ``start`` on."""

    def rewind(self, position: int) -> None:
        """The text may have changed from ``position`` on."""


class RunnerUp(NamedTuple):
    """The token with the next lower perturbed logit: the likeliest one for a verifier to pick instead, under shared noise."""

    token: int
    gap: float  # nats by which its perturbed logit is below the own token's; at least 0


def gap_byte(gap: float) -> int:
    """A gap in nats as a byte from 1 on; 0 stands for an unknown gap."""
    return max(1, min(255, round(gap / UNIT))) if gap < math.inf else 255


@dataclass(slots=True)
class Row:
    """One session's part of a pass: score ``tokens`` from position ``start``, and the guesses after them.

    What the store held from ``start`` on is void. A node's own token depends only on the text and the node's path. Afterwards
    the store holds the path that own tokens take, see `Draft.walk`. A row is never changed. It is not frozen, because every
    session makes one for every pass, and frozen ones take twice as long.
    """

    cache: Any  # a Store of the model that runs the pass, or a fork of one: then the draft is a line
    start: int  # absolute position of tokens[0]; all positions before are in the store
    tokens: Sequence[int]
    num_own: int  # trailing positions of tokens whose own token is wanted; 0 for a prefill chunk that does not end the text
    params: SamplingParams  # the seed is set
    state: Any = None  # a `RowState` of the model that runs the pass, if the parameters are `SamplingParams.shaped`
    draft: Draft = NO_DRAFT  # guesses after tokens; the own token after each of its nodes is wanted, too
    runner_ups: int = 0  # runner-ups that are wanted with each own token
    guesses: int = 0  # guesses that a head may make after the text, or `UNREAD`
    input_ids: Sequence[int] = field(init=False, repr=False, compare=False)  # all that the pass reads: tokens and draft
    num_scored: int = field(init=False, repr=False, compare=False)  # own tokens that are wanted, after the last positions

    def __post_init__(self) -> None:
        guessed = self.draft.tokens
        self.input_ids = [*self.tokens, *guessed] if guessed else self.tokens
        self.num_scored = self.num_own + len(guessed)


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of a row."""

    # own tokens after the last `Row.num_own` tokens, then after each node of the draft, as far as they were computed
    own: Sequence[int] = ()
    draft: Draft = NO_DRAFT  # guesses of a head after the text, if `Row.guesses` asked for any
    runner_ups: Sequence[Sequence[RunnerUp]] = ()  # runner-ups of each of ``own``, the nearest first, if wanted


class Scorer(Protocol):
    """A model as a tier sees it; see `cascade.engine.model.Model` and `cascade.simulation.toy_tier.ToyTier`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_len(self) -> int: ...

    @property
    def cache_tokens(self) -> int:
        """Positions that all stores together can hold."""

    def new_cache(self) -> Store: ...

    def launch(self, rows: Sequence[Row]) -> Any:
        """Begin a pass over ``rows``; `collect` ends it. Nothing else may use their stores meanwhile."""

    def collect(self, launched: Any) -> list[Scored]:
        """Wait for a pass: own tokens of each row; where a grammar could not follow a guess, only those before it.

        Both raise `InvalidRequest` if the request of a row is at fault, and any other error if the pass failed. Then the
        stores' contents from ``start`` on are undefined, and the rows may be scored again.
        """


class Runs:
    """Adds `run` to a `Scorer`."""

    def run(self: Scorer, rows: Sequence[Row]) -> list[Scored]:
        """Run a whole pass: `Scorer.launch`, then `Scorer.collect`."""
        return self.collect(self.launch(rows))


# a guesser, and the arguments of its `Guesser.guess`
Query: TypeAlias = tuple[Any, Sequence[int], int, int]


class Guesser(Protocol):
    """A drafter inside a tier, for one text; see `cascade.drafters`. Only `guess` must be implemented."""

    @classmethod
    def guess_all(cls, queries: Sequence[Query]) -> Sequence[Draft]:
        """Answer the queries of a pass to all guessers of this class."""
        return [guesser.guess(text, since, most) for guesser, text, since, most in queries]

    @property
    def wants(self) -> int:
        """Guesses that the next pass shall make for it, see `Row.guesses`; `UNREAD` if it makes its own."""
        return UNREAD

    def observe(self, last: int, draft: Draft, scored: Scored) -> None:
        """A pass has scored a draft after ``last``, which was the last token of the text then."""
        return

    def cut(self) -> None:
        """The tier above has corrected the text."""
        return

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        """Guesses after a text, at most ``most`` tokens deep. The text before ``since`` is the same as in the last call.

        The drafter chooses its own confidences, one byte each; the planner learns what chance each stands for.
        """

    def close(self, text: Sequence[int]) -> None:
        """The session is over."""
        return


class Drafter(Protocol):
    """A drafter inside one tier. All calls come from that tier's thread."""

    name: str
    level: int  # among drafters and tiers, bottom to top

    def begin(self, tenant: str) -> Guesser:
        """Begin a new text. Texts of one tenant are never used for those of others."""
