"""The state of a session's text on which own tokens depend besides the logits of their pass.

One `SequenceState` belongs to one session at one tier, like its keys and values. Like for these, every row tells it from
which position on the text may have changed. It counts the tokens of the output and follows the grammar, each up to the last
token of the text; guesses after it count only for one pass.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cascade.engine.devices import sent
from cascade.errors import InvalidRequest
from cascade.messages import Logprobs, SessionSpec
from cascade.params import Structured

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
        self._ends: Tensor | None = None

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

    def in_prompt(self, like: Tensor) -> Tensor:
        """A mask of the tokens in the prompt: bool ``[V]``."""
        if self._in_prompt is None:
            self._in_prompt = torch.zeros(like.shape[-1], dtype=torch.bool, device=like.device)
            self._in_prompt[torch.tensor(self.text[: self.prompt_len], device=like.device)] = True
        return self._in_prompt

    def bias(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids ``[k]`` and the bias added to their logits, float32 ``[k]``."""
        if self._bias is None:
            pairs = [pair for pair in self._params.biases if pair[0] < like.shape[-1]]
            ids = torch.tensor([token for token, _ in pairs], dtype=torch.long, device=like.device)
            self._bias = ids, torch.tensor([float(bias) for _, bias in pairs], device=like.device)
        return self._bias

    def ends(self, like: Tensor) -> Tensor:
        """Ending tokens, int64 ``[k]``."""
        if self._ends is None:
            ids = [token for token in self._end_ids if token < like.shape[-1]]
            self._ends = torch.tensor(ids, dtype=torch.long, device=like.device)
        return self._ends

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
