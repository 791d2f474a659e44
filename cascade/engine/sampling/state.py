"""Sampling parameters that need a state (bias, penalties, `min_tokens`, grammars), and log-probabilities of own tokens.

One `SequenceState` belongs to one session at one tier, like its keys and values. Like for these, every row tells it from
which position on the text may have changed. It counts the tokens of the output and follows the grammar, each up to the last
token of the text; guesses after it count only for one pass.

A position is scored before it is known whether the guesses before it are right. Its own token follows the text *with* these
guesses, so each position of a row sees the row's earlier tokens, and no later ones.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cascade.engine.devices import sent
from cascade.errors import InvalidRequest
from cascade.messages import Logprobs, SessionSpec
from cascade.params import Structured
from cascade.scorer import Row

if TYPE_CHECKING:
    from cascade.engine.grammar import Matcher  # toy models have states, and no grammar library


class SequenceState:
    """The output of a session so far, and the log-probabilities of its tokens.

    ``text`` is the session's own list, which grows and is cut while this object refers to it.
    """

    def __init__(self, spec: SessionSpec, text: Sequence[int], constraint: "Matcher | None" = None) -> None:
        params = spec.params
        self.prompt_len = spec.prompt_len
        self.text = text
        self.constraint = constraint
        self.alters = params.penalised or bool(params.biases or params.min_tokens or params.structured)
        self._params = params
        self._end_ids = sorted(spec.ends)
        self._begin = len(spec.tokens)  # this session picks the tokens from here on
        self._logprobs: list[Logprobs] = []  # one for each token from `_begin` on
        self._prompt: list[Logprobs] = []  # one for each token from position 1 on
        self._counted: list[int] = []  # output tokens in _counts
        self._counts: Tensor | None = None  # [vocab_size] float32
        self._in_prompt: Tensor | None = None  # [vocab_size] bool
        self._bias: tuple[Tensor, Tensor] | None = None  # ids and what is added to their logits

    def rewind(self, position: int) -> None:
        """Note that the text from ``position`` on may have changed."""
        num_tokens = max(0, position - self.prompt_len)
        if self.constraint is not None:
            self.constraint.rewind(num_tokens)
        if gone := self._counted[num_tokens:]:
            assert self._counts is not None
            _add(self._counts, gone, -1.0)
            del self._counted[num_tokens:]

    def counts(self, end: int, guesses: Sequence[int], like: Tensor) -> Tensor:
        """Counts of each token in the output up to ``end``, then with one guess more each: float32, as ``like`` ``[n, V]``."""
        if self._counts is None:
            self._counts = torch.zeros(like.shape[-1], device=like.device)
        new = self.text[self.prompt_len + len(self._counted) : end]
        if new:
            _add(self._counts, new, 1.0)
            self._counted += new
        counts = self._counts.expand_as(like)
        if guesses:
            ids = sent(guesses, like.device).expand(len(like), -1)
            counts = counts.scatter_add(1, ids, torch.ones(ids.shape, device=like.device).tril(-1))
        return counts

    def shape(self, scores: Tensor, position: int, guesses: Sequence[int]) -> int:
        """Change scores ``[1 + guesses, V]`` from ``position`` on in place, in vLLM's order: bias, penalties, then masks.

        Returns the number of positions, from the first on, for which the grammar's allowed tokens are known.
        """
        params, size, device = self._params, scores.shape[-1], scores.device
        if params.biases:
            if self._bias is None:
                pairs = [pair for pair in params.biases if pair[0] < size]
                ids = torch.tensor([token for token, _ in pairs], dtype=torch.long, device=device)
                self._bias = ids, torch.tensor([float(bias) for _, bias in pairs], device=device)
            ids, bias = self._bias
            scores.index_add_(1, ids, bias.expand(len(scores), -1))
        if params.penalised:
            self._penalise(scores, self.counts(position, guesses, scores))
        return self._mask(scores, position, guesses)

    def _penalise(self, scores: Tensor, counts: Tensor) -> None:
        """Repetition counts prompt and output, as in CTRL (arXiv 1909.05858); frequency and presence the output, as OpenAI."""
        params, penalty = self._params, self._params.repetition_penalty
        if penalty != 1:
            if self._in_prompt is None:
                self._in_prompt = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
                self._in_prompt[torch.tensor(self.text[: self.prompt_len], device=scores.device)] = True
            seen = (counts > 0) | self._in_prompt
            scores.copy_(torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores))
        if params.frequency_penalty:
            scores.sub_(counts, alpha=params.frequency_penalty)
        if params.presence_penalty:
            scores.sub_((counts > 0).float(), alpha=params.presence_penalty)

    def _mask(self, scores: Tensor, position: int, guesses: Sequence[int]) -> int:
        """Remove ending tokens before `min_tokens`, and tokens that the grammar forbids; if no other is left, ending tokens
        stay."""
        num_early = min(max(0, self._params.min_tokens - (position - self.prompt_len)), len(scores))
        if self.constraint is None:
            if num_early:
                scores[:num_early].index_fill_(1, self._ends(scores), -torch.inf)
            return len(scores)
        output = self.text[self.prompt_len : position]
        allowed = torch.from_numpy(self.constraint.allowed(output, guesses, scores.shape[-1]))
        if num_early:
            going_on = allowed[:num_early].index_fill(1, self._ends(allowed), False)
            allowed[:num_early] = torch.where(going_on.any(-1, keepdim=True), going_on, allowed[:num_early])
        scores[: len(allowed)].masked_fill_(~allowed.to(scores.device, non_blocking=True), -torch.inf)
        return len(allowed)

    def _ends(self, like: Tensor) -> Tensor:
        ids = [token for token in self._end_ids if token < like.shape[-1]]
        return sent(ids, like.device)

    def scores_prompt(self, position: int) -> bool:
        """Whether a row with its first own token at ``position`` serves only the prompt's log-probabilities."""
        return position < self.prompt_len

    def note(self, position: int, logprobs: Sequence[Logprobs]) -> None:
        """Keep the log-probabilities of tokens from ``position`` on: own ones, or those of the prompt."""
        if self.scores_prompt(position):
            self._prompt[position - 1 :] = logprobs
        else:
            self._logprobs[position - self._begin :] = logprobs

    @property
    def prompt_logprobs(self) -> tuple[Logprobs, ...]:
        """Log-probabilities of the prompt's tokens except the first."""
        return tuple(self._prompt)

    def logprobs(self, start: int, num_tokens: int) -> tuple[Logprobs, ...]:
        """Log-probabilities of ``num_tokens`` own tokens from ``start`` on."""
        begin = start - self._begin
        return tuple(self._logprobs[begin : begin + num_tokens])


@torch.inference_mode()  # counts are made in inference mode; corrections change them between passes
def _add(counts: Tensor, tokens: Sequence[int], what: float) -> None:
    ids = sent(tokens, counts.device)
    counts.index_add_(0, ids, torch.full((len(tokens),), what, device=counts.device))


def state_maker(
    matcher: Callable[[Structured], "Matcher"] | None = None,
) -> Callable[[SessionSpec, Sequence[int]], SequenceState]:
    """A factory of the states of a tier's sessions; ``matcher`` compiles grammars, and raises `InvalidRequest`."""

    def make(spec: SessionSpec, text: Sequence[int]) -> SequenceState:
        structured = spec.params.structured
        if structured is None:
            return SequenceState(spec, text)
        if matcher is None:
            raise InvalidRequest("this tier cannot follow a grammar: its model came without a tokenizer")
        return SequenceState(spec, text, matcher(structured))

    return make


# for all rows of a pass


def shape(logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, list[int]]:
    """Logits ``[sum of num_scored, V]`` after bias, penalties and masks; the same tensor if no row needs them.

    Also returns how many of each row's own tokens are valid: fewer than all if its grammar could not follow a guess. Rows
    without a state keep their values, so that other rows of a pass do not change a text.
    """
    counts = [row.num_scored for row in rows]
    states = [row.state for row in rows if row.state is not None]
    for row in rows:
        if row.state is not None:
            row.state.rewind(row.start)
    if not any(state.alters for state in states):
        return logits, counts
    shaped = logits.to(torch.float32, copy=True)
    begin = 0
    for place, row in enumerate(rows):
        if row.state is not None and row.state.alters and row.num_scored and not row.state.scores_prompt(_first(row)):
            guesses = row.input_ids[len(row.input_ids) - row.num_scored + 1 :]
            counts[place] = row.state.shape(shaped[begin : begin + row.num_scored], _first(row), guesses)
        begin += row.num_scored
    return shaped, counts


def report(logits: Tensor, rows: Sequence[Row], own: Sequence[Sequence[int]]) -> None:
    """Write the log-probabilities of ``own`` tokens, or of the prompt's, into the states of the rows that request them.

    They are computed from the raw ``logits`` ``[sum of num_scored, V]``, before any sampling parameter. A row may
    have fewer own tokens than it requested; if it has none, nothing is reported for it.
    """
    begin = 0
    for row, tokens in zip(rows, own, strict=True):
        if row.state is not None and row.params.logprobs is not None and tokens:
            position, end = _first(row), begin + len(tokens)
            scored = row.state.text[position : position + len(tokens)] if row.state.scores_prompt(position) else tokens
            row.state.note(position, _logprobs(logits[begin:end], scored, row.params.logprobs))
        begin += row.num_scored


def _first(row: Row) -> int:
    return row.start + len(row.input_ids) - row.num_scored + 1


def _logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[Logprobs]:
    """Log-probabilities of ``tokens`` ``[n]`` and of the ``num_top`` likeliest ones, one host read each."""
    logs = logits.float().log_softmax(-1)
    chosen = logs.gather(1, torch.tensor(tokens, device=logs.device)[:, None])[:, 0].tolist()
    top = logs.topk(min(num_top, logs.shape[-1]), dim=-1)
    ranked = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [Logprobs(own, tuple(zip(ids, values, strict=True))) for own, (ids, values) in zip(chosen, ranked, strict=True)]
