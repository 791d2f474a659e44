"""The seam between a tier and its model: rows of a pass go in, own tokens come out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from cascade.draft import NO_DRAFT, Draft
from cascade.messages import Logprobs
from cascade.params import SamplingParams

BLOCK = 16  # positions
TILE = 64  # positions that attention reads at once, see `cascade.engine.network.contiguous`
MAX_FORKED = 32  # positions of a fork, see `Store.fork`
UNIT = 1 / 16  # a gap of 1 on the wire, in nats
UNREAD = -1  # `Row.guesses` where no drafter reads the model
GROWTH = 16  # a full allocation grows by at least 1/16 of itself: so little is copied, and little held in vain


def num_blocks(positions: int) -> int:
    """Blocks for so many positions."""
    return -(-positions // BLOCK)


def tiled(positions: int) -> int:
    """So many positions, rounded up to whole tiles."""
    return -(-positions // TILE) * TILE


def grown_capacity(positions: int, capacity: int) -> int:
    """New capacity, in positions, of a store for ``capacity`` positions that has to hold ``positions``."""
    return BLOCK * max(num_blocks(positions), num_blocks(capacity + capacity // GROWTH))


class Store(Protocol):
    """Keys and values of one session at one tier; see `cascade.engine.network.contiguous.Cache`."""

    @property
    def block(self) -> int:
        """Positions that are reserved at once: a multiple of `BLOCK`."""

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` in all; what is written stays."""

    def reuse(self, source: Any, positions: int) -> None:
        """Hold what another store of the same model has of the first ``positions``; there is room for them."""

    def fork(self, position: int) -> Any:
        """A store that shares what is before ``position``, and is empty and on its own from there on.

        Rows over a fork start at ``position`` or after, and end at most `MAX_FORKED` positions after it. Neither store sees
        what the other one writes from ``position`` on, even in the same pass. A fork is void once this store is written before
        ``position``.
        """

    def join(self, fork: Any) -> None:
        """Take over what ``fork``, a fork of this store, holds; the fork is freed."""

    def free(self) -> None:
        """Give the memory back; the store is not used again."""


class RowState(Protocol):
    """What own tokens of a session depend on beside logits; see `cascade.engine.sampling.state`."""

    prompt_len: int

    @property
    def prompt_logprobs(self) -> tuple[Logprobs, ...]:
        """Of the prompt's tokens but the first, as far as they are scored."""

    def logprobs(self, start: int, num_tokens: int) -> tuple[Logprobs, ...]:
        """Of ``num_tokens`` own tokens from ``start`` on."""

    def rewind(self, position: int) -> None:
        """The text from ``position`` on may be another one than before."""


class RunnerUp(NamedTuple):
    """A token of the next lower perturbed logit: under shared noise what a verifier most likely says instead of the own one."""

    token: int
    gap: float  # nats from its perturbed logit to the own token's; at least 0


def gap_byte(gap: float) -> int:
    """A gap in nats as a byte from 1 on; 0 stands for a gap that nobody knows."""
    return max(1, min(255, round(gap / UNIT))) if gap < math.inf else 255


@dataclass(slots=True)
class Row:
    """One session's part of a pass: score ``tokens`` from position ``start``, and the guesses after them.

    What the store held from ``start`` on is void. A node's own token is that of the text with the node's path, and nothing else
    of the tree. Afterwards the store holds the path that own tokens take, see `Draft.walk`. It is never changed, but not
    frozen: every session makes one for every pass, and that would take twice as long.
    """

    cache: Any  # a Store of the model that runs the pass, or a fork of one: then the draft is a line
    start: int  # absolute position of tokens[0]; all positions before are in the store
    tokens: Sequence[int]
    num_own: int  # trailing positions of tokens whose own token is wanted; 0 for a prefill chunk that does not end the text
    params: SamplingParams  # the seed is set
    state: Any = None  # a `RowState` of the model that runs the pass, if the parameters are `SamplingParams.shaped`
    draft: Draft = NO_DRAFT  # guesses after tokens; the own token after each of its nodes is wanted, too
    runner_ups: int = 0  # wanted with each own token
    guesses: int = 0  # guesses that a drafter which reads the model may make after the text, or `UNREAD`
    input_ids: Sequence[int] = field(init=False, repr=False, compare=False)  # all that the pass reads: tokens and draft
    num_scored: int = field(init=False, repr=False, compare=False)  # own tokens that are wanted, after the last positions

    def __post_init__(self) -> None:
        guessed = self.draft.tokens
        self.input_ids = [*self.tokens, *guessed] if guessed else self.tokens
        self.num_scored = self.num_own + len(guessed)


@dataclass(frozen=True, slots=True)
class Scored:
    """What a pass says of a row."""

    # own tokens after the last `Row.num_own` tokens, then after each node of the draft, as far as is known
    own: Sequence[int] = ()
    draft: Draft = NO_DRAFT  # guesses after these by a drafter that reads the model, if `Row.guesses` asked for any
    runner_ups: Sequence[Sequence[RunnerUp]] = ()  # runner-ups of each of ``own``, if any were asked for: the nearest first


class Scorer(Protocol):
    """A model as a tier sees it; see `cascade.engine.model.Model` and `cascade.simulation.toy_tier.ToyTier`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_len(self) -> int: ...

    @property
    def cache_tokens(self) -> int:
        """Positions for which there is memory, of all stores together."""

    def new_cache(self) -> Store: ...

    def launch(self, rows: Sequence[Row]) -> Any:
        """Begin a pass over ``rows``, which is `collect`'s to end. Nothing else may use their stores meanwhile."""

    def collect(self, launched: Any) -> list[Scored]:
        """Wait for a pass: own tokens of each row; where a grammar could not follow a guess, only those before it.

        Both raise `InvalidRequest` if a row's request is to blame, and anything else if the pass failed: then stores may hold
        anything from ``start`` on, and the rows may be scored again.
        """


class Runs:
    """For a `Scorer`: a pass with nothing beside it."""

    def run(self: Scorer, rows: Sequence[Row]) -> list[Scored]:
        """`Scorer.launch` and `Scorer.collect`."""
        return self.collect(self.launch(rows))


# a guesser, and the arguments of its `Guesser.guess`
Query: TypeAlias = tuple[Any, Sequence[int], int, int]


class Guesser(Protocol):
    """What a drafter inside a tier knows of one text; see `cascade.drafters`. Only `guess` has to be written."""

    @classmethod
    def guess_all(cls, queries: Sequence[Query]) -> Sequence[Draft]:
        """`guess` of all texts of a pass whose guessers are of this class."""
        return [guesser.guess(text, since, most) for guesser, text, since, most in queries]

    @property
    def wants(self) -> int:
        """Guesses that the next pass is to make for it, see `Row.guesses`; `UNREAD` if it makes its own."""
        return UNREAD

    def observe(self, last: int, draft: Draft, scored: Scored) -> None:
        """A pass scored ``last``, then the last token of the text, and a draft after it."""
        return

    def cut(self) -> None:
        """The tier above has corrected the text."""
        return

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        """What may come after a text, at most ``most`` tokens deep. Before ``since`` the text is that of the last call.

        Confidences are bytes of the drafter's own choice: what chance each stands for is learnt.
        """

    def close(self, text: Sequence[int]) -> None:
        """The session is over."""
        return


class Drafter(Protocol):
    """Guesses after the texts of one tier, without a tier below. All its calls come from that tier's thread."""

    name: str
    level: int  # among drafters and tiers, bottom to top

    def begin(self, tenant: str) -> Guesser:
        """A new text; what texts of one tenant say is never used for those of others."""
