"""The seam between a tier and its model: rows of a pass go in, own tokens come out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from cascade.draft import NO_DRAFT, Dist, Draft
from cascade.messages import Logprobs
from cascade.params import Rule, SamplingParams

BLOCK = 16  # positions
TILE = 64  # positions that attention looks at at once, see `cascade.engine.network.contiguous`
MAX_FORKED = 32  # positions of a fork, see `Store.fork`
UNIT = 1 / 16  # of gaps on the wire, in nats
UNREAD = -1  # guesses of a row whose text no drafter reads
GROWTH = 16  # a full allocation grows by at least 1/16 of itself: little is copied, and little held in vain


def num_blocks(positions: int) -> int:
    """Blocks that hold so many positions."""
    return -(-positions // BLOCK)


def tiled(positions: int) -> int:
    """Positions of the whole tiles that hold so many."""
    return -(-positions // TILE) * TILE


def grown_capacity(positions: int, capacity: int) -> int:
    """New capacity, in positions, of a store for ``capacity`` positions that has to hold ``positions``."""
    return BLOCK * max(num_blocks(positions), num_blocks(capacity + capacity // GROWTH))


class Store(Protocol):
    """Keys and values of one session at one tier; see `cascade.engine.network.contiguous.Cache`."""

    @property
    def block(self) -> int:
        """Positions that are taken and given back at once: a multiple of `cascade.tier.block_manager.BLOCK`."""

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` in all; what is written stays."""

    def reuse(self, source: Any, positions: int) -> None:
        """Hold what another store of the same model has of the first ``positions``; there is room for them."""

    def fork(self, position: int) -> Any:
        """A store that goes on otherwise from ``position`` on, empty there; what is before it is this one's.

        Rows over a fork start at ``position`` or after, and end no further after it than `MAX_FORKED`. It is void once this
        store is written before ``position``, but what is written here from there on, even in the same pass, leaves it as it
        is; and the other way round.
        """

    def join(self, fork: Any) -> None:
        """Take over what ``fork``, a fork of this store, holds from its position on; the fork is freed."""

    def free(self) -> None:
        """Give the memory back; the store is not used again."""


class RowState(Protocol):
    """What own tokens of a session depend on besides the logits of their pass; see `cascade.engine.sampling.state`."""

    prompt_len: int

    @property
    def prompt_logprobs(self) -> tuple[Logprobs, ...]:
        """Of the prompt's tokens but the first, as far as they are scored."""

    def logprobs(self, start: int, num_tokens: int) -> tuple[Logprobs, ...]:
        """Of ``num_tokens`` own tokens from ``start`` on."""


class RunnerUp(NamedTuple):
    """A token that was nearly the own one, the next by perturbed logit: under shared noise, what a verifier may say instead."""

    token: int
    gap: float  # by which its perturbed logit is less than the own token's, at least 0


def gap_byte(gap: float) -> int:
    """A gap in nats as a byte, which is never 0: that is a guess of which nobody knows the gap."""
    return max(1, min(255, round(gap / UNIT))) if gap < math.inf else 255


@dataclass(frozen=True, slots=True)
class Draw:
    """How own tokens of a row are drawn where their noise is not the shared one, see `cascade.session.rounds`."""

    keys: Sequence[int]  # one for each own token: its noise is a function of its key alone, 64 bits with a sign
    rule: Rule = "coupled"  # by which the guesses of the row's draft are accepted, see `cascade.engine.sampling.acceptance`
    draft_top_k: int | None = None  # own tokens are among so many, 0 for all, and what they are drawn from is wanted; None: not


@dataclass(frozen=True, slots=True)
class Row:
    """One session's part of a pass: score ``tokens`` from position ``start``, and the guesses after them.

    What the store held from ``start`` on is void. Where the draft is a tree, each node's own token is that of the text with
    the node's path, and nothing else; afterwards the store holds the path that own tokens take, see `Draft.walk`.
    """

    cache: Any  # a Store of the model that runs the pass, or a fork of one: then the draft is a line
    start: int  # absolute position of tokens[0]; all positions before are in the store
    tokens: Sequence[int]
    num_own: int  # trailing positions of tokens whose own token is wanted; 0 for a prefill chunk that does not end the text
    params: SamplingParams  # with a seed
    state: Any = None  # a `RowState` of the model that runs the pass, if the parameters are `SamplingParams.shaped`
    draft: Draft = NO_DRAFT  # guesses after tokens; the own token after each of its nodes is wanted, too
    runner_ups: int = 0  # wanted with each own token
    guesses: int = 0  # that a drafter which reads the model may make after the text, one after another, or `UNREAD`
    draw: Draw | None = None  # instead of shared noise; the draft is a line then
    input_ids: Sequence[int] = field(init=False, repr=False, compare=False)  # all tokens that the pass reads: those of both

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", [*self.tokens, *self.draft.tokens] if self.draft else self.tokens)

    @property
    def num_scored(self) -> int:
        """Positions of the pass whose own tokens are wanted: the last ones of ``input_ids``."""
        return self.num_own + len(self.draft)


@dataclass(frozen=True, slots=True)
class Scored:
    """What a pass says of a row."""

    own: Sequence[int] = ()  # after the last `Row.num_own` tokens, then after each node of its draft, as far as is known
    draft: Draft = NO_DRAFT  # what a drafter that reads the model guesses after these, if `Row.guesses` asked for any
    runner_ups: Sequence[Sequence[RunnerUp]] = ()  # of each of ``own``, if any were asked for: the nearest first
    dists: Sequence[Dist] = ()  # what each of ``own`` was drawn from, if `Draw.draft_top_k` asked for it


class Scorer(Protocol):
    """A model as a tier sees it; see `cascade.engine.model.Model` and `benchmarks.toy.ToyModel`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_len(self) -> int: ...

    @property
    def cache_tokens(self) -> int:
        """Positions for which there is memory, of all stores together."""

    def new_cache(self) -> Store: ...

    def run(self, rows: Sequence[Row]) -> list[Scored]:
        """Own tokens of each row; for a grammar that could not follow a guess, those before it alone.

        Raises `InvalidRequest` if a row's request is to blame, and anything else if the pass failed: nothing is known of what
        the stores hold from ``start`` on then, and the rows may be scored again.
        """


class Guesser(Protocol):
    """What a drafter inside a tier knows of one text; see `cascade.drafters`. Only `guess` has to be written."""

    @property
    def wants(self) -> int:
        """Guesses that the next pass shall make for it, see `Row.guesses`; `UNREAD` if it makes its own."""
        return UNREAD

    def observe(self, last: int, draft: Draft, scored: Scored) -> None:
        """A pass said something of the text, whose last token then was ``last``, and of a draft after it."""
        return

    def cut(self) -> None:
        """The tier above says that the text goes on otherwise."""
        return

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        """What may come after a text, at most ``most`` tokens deep; before ``since`` it is what it was at the last call.

        Confidences are kinds of the drafter's own: bytes that are learnt to stand for chances.
        """

    def close(self, text: Sequence[int]) -> None:
        """The text goes on no further, or not here."""
        return


class Drafter(Protocol):
    """Guesses after the texts of one tier, without a tier below. All its calls come from that tier's thread."""

    name: str
    level: int  # among drafters and tiers, bottom to top

    def begin(self, tenant: str) -> Guesser:
        """Another text; what texts of one tenant say is never used for those of others."""
