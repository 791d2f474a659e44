"""Models that need no weights, strict where a real model is silently wrong: what a store holds is what was written to it.

>>> full, tiny = ToyModel(32), ToyModel(32, agreement=0.7)
>>> Cascade([tiny, full], tokenizer)
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from cascade.draft import Draft
from cascade.engine.sampling.own_tokens import own_tokens_and_next
from cascade.engine.sampling.state import SequenceState, report, shape
from cascade.messages import SessionSpec
from cascade.params import SamplingParams
from cascade.scorer import MAX_FORKED, Row, RunnerUp, Scored
from cascade.simulation.toy_tier import ToyTier, fold
from cascade.splitmix import GOLDEN, mix

_SPREAD = 8.0  # logits are uniform from 0 to this: about 2.5 likely tokens at temperature 1
_CACHED = 1 << 16  # contexts and positions remembered

Numbers = npt.NDArray[np.float64]


def pass_cost(base_s: float, token_s: float = 0.0) -> Callable[..., float]:
    """The price of passes: ``base_s`` seconds, and ``token_s`` for each token after the first."""
    return lambda num_tokens, context=0: base_s + token_s * (num_tokens - 1)


class ToyCache:
    """Tokens by position, as a model's keys and values: a write voids nothing after it."""

    block = 16

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.room: int | None = None  # positions reserved; None: nobody keeps count
        self.freed = False
        self.forks: list[ToyFork] = []  # forks that are neither joined nor freed

    @property
    def nbytes(self) -> int:
        return 4 * len(self.tokens)

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Keep ``tokens`` at ``start`` and after; positions before ``start`` must have been written."""
        assert not self.freed, "the cache was freed"
        assert 0 <= start <= len(self.tokens), f"nothing was written at {len(self.tokens)}, and {start} is behind it"
        assert self.room is None or start + len(tokens) <= self.room, f"room for {self.room} positions was reserved"
        self.tokens[start : start + len(tokens)] = tokens
        for fork in self.forks:
            fork.void |= start < fork.position

    def before(self, position: int, count: int) -> list[int]:
        return self.tokens[max(0, position - count) : position]

    def reserve(self, positions: int) -> None:
        assert not self.freed, "the cache was freed"
        self.room = max(self.room or 0, positions)

    def reuse(self, source: "ToyCache", positions: int) -> None:
        assert not source.freed, "the cache was freed"
        assert positions <= len(source.tokens), f"{len(source.tokens)} positions were written, not {positions}"
        self.write(0, source.tokens[:positions])

    def fork(self, position: int) -> "ToyFork":
        assert not self.freed, "the cache was freed"
        assert position <= len(self.tokens), f"{len(self.tokens)} positions were written, and the fork is at {position}"
        self.forks.append(ToyFork(self, position))
        return self.forks[-1]

    def join(self, fork: "ToyFork") -> None:
        fork.check()
        self.tokens[fork.position :] = fork.tokens
        fork.free()

    def free(self) -> None:
        assert not self.forks, "a fork outlives the cache"
        self.freed = True
        self.tokens.clear()


class ToyFork:
    """Tokens from ``position`` on beside those of ``base``, which must not be written before it any more."""

    def __init__(self, base: ToyCache, position: int) -> None:
        self.position = position
        self.tokens: list[int] = []
        self.void = False
        self._base = base

    def check(self) -> None:
        assert self in self._base.forks, "the fork is gone"
        assert not self.void, "the cache was written before its fork"

    def write(self, start: int, tokens: Sequence[int]) -> None:
        self.check()
        place = start - self.position
        assert 0 <= place <= len(self.tokens), f"nothing was written before {start}"
        assert place + len(tokens) <= MAX_FORKED, f"a fork has room for {MAX_FORKED} positions"
        self.tokens[place : place + len(tokens)] = tokens

    def before(self, position: int, count: int) -> list[int]:
        own = self.tokens[max(0, position - self.position - count) : max(0, position - self.position)]
        return [*self._base.before(min(position, self.position), count - len(own)), *own]

    def free(self) -> None:
        assert self in self._base.forks, "the fork is gone"
        self._base.forks.remove(self)


class ToyModel(ToyTier):
    """A language whose next-token logits are a hash of the last ``order`` tokens in the cache and of ``seed``.

    Models with one ``seed``, ``vocab_size`` and ``order`` share the language. One with ``agreement`` below 1 has other logits,
    and at temperature 0 another own token, in the share ``1 - agreement`` of all contexts; the shared noise lets it agree more
    often at higher ones. Models of different ``agreement`` err independently of each other; equal ones are the same model. Of
    the sampling parameters only temperature and seed are honoured, unless a row has a state: then all are, with the noise of
    `cascade.engine.sampling.own_tokens`. A pass sleeps ``pass_s + token_s * tokens`` seconds.
    """

    def __init__(
        self,
        vocab_size: int = 32,
        order: int = 3,
        seed: int = 0,
        *,
        agreement: float = 1.0,
        context_len: int = 4096,
        cache_tokens: int = 1 << 20,
        pass_s: float = 0.0,
        token_s: float = 0.0,
    ) -> None:
        assert vocab_size >= 2
        assert order >= 1
        assert 0 <= agreement <= 1
        self.vocab_size, self.order, self.seed, self.agreement = vocab_size, order, seed, agreement
        self.context_len, self.cache_tokens = context_len, cache_tokens
        self.pass_s, self.token_s = pass_s, token_s
        self.passes = 0
        self.tokens = 0  # scored, in all passes

    def new_cache(self) -> ToyCache:
        return ToyCache()

    def collect(self, launched: Sequence[Row]) -> list[Scored]:
        for row in launched:
            self._check(row)
        scored = super().collect(launched)
        num_tokens = sum(len(row.input_ids) for row in launched)
        self.passes += 1
        self.tokens += num_tokens
        if self.pass_s or self.token_s:
            time.sleep(self.pass_s + self.token_s * num_tokens)
        return scored

    def _check(self, row: Row) -> None:
        assert isinstance(row.cache, ToyCache | ToyFork)
        assert 0 <= row.num_scored <= len(row.input_ids) > 0
        end = row.start + len(row.tokens)
        assert end + row.draft.height <= self.context_len, f"a context of {self.context_len} ends before {end}"
        assert all(0 <= token < self.vocab_size for token in row.input_ids), "a token is not of the vocabulary"

    def logits(self, context: tuple[int, ...]) -> Numbers:
        """Of the token after ``context``, the last ``order`` tokens; the full model's, or these turned by one token."""
        logits = _language(self.seed, self.vocab_size, context)
        lot = mix(fold(context, self.seed ^ hash(self.agreement)) ^ GOLDEN)
        return logits if lot < self.agreement * 2**64 else np.roll(logits, -1)

    def own(self, context: tuple[int, ...], position: int, params: SamplingParams) -> int:
        """The own token at ``position``, after ``context``: argmax of logits / temperature + noise(seed, position)."""
        return self.ranked(context, position, params, 1)[0].token

    def ranked(self, context: tuple[int, ...], position: int, params: SamplingParams, count: int) -> list[RunnerUp]:
        """The own token and the next ones, each with its gap to the first."""
        scores = self.logits(context)
        if params.temperature > 0:
            assert params.seed is not None
            noise = _gumbel(params.seed, position, self.vocab_size)
            scores = scores / params.temperature + noise
        if count == 1:
            return [RunnerUp(int(scores.argmax()), 0.0)]
        last = -min(count, len(scores))
        near = np.flatnonzero(scores >= np.partition(scores, last)[last])
        order = near[np.argsort(-scores[near], kind="stable")][:count].tolist()
        return [RunnerUp(token, float(scores[order[0]] - scores[token])) for token in order]

    def _own(self, row: Row, contexts: Sequence[tuple[int, ...]], positions: Sequence[int]) -> Scored:
        return super()._own(row, contexts, positions) if row.state is None else self._shaped(row, contexts)

    def _shaped(self, row: Row, contexts: Sequence[tuple[int, ...]]) -> Scored:
        """What `cascade.engine.model.Model` does with its logits: a tree is its paths, the one that own tokens take at last."""
        draft = row.draft
        if draft.is_line:
            return Scored(self._shaped_line(row, contexts))
        own_at: dict[int, int] = {}
        leaves = [node for node in range(len(draft)) if not any(True for _ in draft.children(node))]
        for leaf in leaves:
            path = [leaf]
            while (parent := draft.parent(path[0])) >= 0:
                path.insert(0, parent)
            self._shaped_path(row, contexts, path, own_at)
        own = [own_at[node] for node in range(-1, next((n for n in range(len(draft)) if n not in own_at), len(draft)))]
        self._shaped_path(row, contexts, draft.walk(own)[1], own_at)
        return Scored(own)

    def _shaped_path(self, row: Row, contexts: Sequence[tuple[int, ...]], path: Sequence[int], own_at: dict[int, int]) -> None:
        """Own tokens after the text and the nodes of a path, as far as they are known."""
        line = replace(row, draft=Draft(tuple(row.draft.tokens[node] for node in path), bytes(len(path))))
        own = self._shaped_line(line, [contexts[row.num_own + node] for node in (-1, *path)])
        own_at.update(zip((-1, *path), own, strict=False))

    def _shaped_line(self, row: Row, contexts: Sequence[tuple[int, ...]]) -> list[int]:
        logits = torch.from_numpy(np.array([self.logits(context) for context in contexts])).float().reshape(-1, self.vocab_size)
        position = row.start + len(row.input_ids) - row.num_scored + 1
        shaped, [num_known] = shape(logits, [row])
        own: list[int] = own_tokens_and_next(shaped, [(row.params, position, row.num_scored)])[0].tolist()[:num_known]
        report(logits, [row], [own])
        return own


def full_text(model: ToyTier, spec: SessionSpec) -> list[int]:
    """Prompt and output of plain decoding by ``model`` alone, token by token: what any cascade below it must give."""
    text = list(spec.tokens)
    state = SequenceState(spec, text) if spec.params.shaped else None
    cache = model.new_cache()
    num_known, limit = 0, spec.prompt_len + spec.params.max_tokens
    while len(text) < limit and not (len(text) > spec.prompt_len and text[-1] in spec.ends):
        [scored] = model.run([Row(cache, num_known, text[num_known:], 1, spec.params, state)])
        num_known = len(text)
        text.append(scored.own[0])
    return text


@lru_cache(_CACHED)
def _language(seed: int, vocab_size: int, context: tuple[int, ...]) -> Numbers:
    return _SPREAD * _uniforms(fold(context, seed), vocab_size)


@lru_cache(_CACHED)
def _gumbel(seed: int, position: int, vocab_size: int) -> Numbers:
    """Standard Gumbel noise by a counter-based generator, as `cascade.engine.sampling.own_tokens.gumbel`."""
    key = mix(mix(position + GOLDEN) ^ mix(seed))
    return np.asarray(-np.log(-np.log(_uniforms(key, vocab_size))))


def _uniforms(key: int, count: int) -> Numbers:
    """The first ``count`` numbers that `uniform` gives for a key, at once: servers in tests have a vocabulary of thousands."""
    z = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)  # `mix`, whose integers wrap here
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (((z ^ z >> np.uint64(31)) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
