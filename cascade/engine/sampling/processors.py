"""Sampling parameters that need a state (bias, penalties, `min_tokens`, grammars), and log-probabilities of own tokens.

A position is scored before it is known whether the guesses before it are right. Its own token follows the text *with* these
guesses, so each position of a row sees the row's earlier tokens, and no later ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cascade.engine.sampling.state import SequenceState
from cascade.messages import Logprobs
from cascade.params import SamplingParams
from cascade.scorer import Row


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
            counts[place] = _shape(shaped[begin : begin + row.num_scored], row.params, row.state, _first(row), guesses)
        begin += row.num_scored
    return shaped, counts


def _shape(scores: Tensor, params: SamplingParams, state: SequenceState, position: int, guesses: Sequence[int]) -> int:
    """Change scores ``[1 + guesses, V]`` from ``position`` on in place, in vLLM's order: bias, penalties, then masks.

    Returns the number of positions for which the grammar's allowed tokens are known.
    """
    if params.biases:
        ids, bias = state.bias(scores)
        scores.index_add_(1, ids, bias.expand(len(scores), -1))
    if params.penalised:
        _penalise(scores, params, state.counts(position, guesses, scores), state)
    return _mask(scores, params, state, position, guesses)


def _penalise(scores: Tensor, params: SamplingParams, counts: Tensor, state: SequenceState) -> None:
    """Repetition over prompt and output as in CTRL (arXiv 1909.05858); frequency and presence over the output, as OpenAI's."""
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        seen = (counts > 0) | state.in_prompt(scores)
        scores.copy_(torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores))
    if params.frequency_penalty:
        scores.sub_(counts, alpha=params.frequency_penalty)
    if params.presence_penalty:
        scores.sub_((counts > 0).float(), alpha=params.presence_penalty)


def _mask(scores: Tensor, params: SamplingParams, state: SequenceState, position: int, guesses: Sequence[int]) -> int:
    """Remove ending tokens before `min_tokens`, and tokens that the grammar forbids; if no other is left, ending tokens stay.

    Returns the number of positions, from the first on, for which the grammar's allowed tokens are known.
    """
    num_early = min(max(0, params.min_tokens - (position - state.prompt_len)), len(scores))
    if state.constraint is None:
        if num_early:
            scores[:num_early].index_fill_(1, state.ends(scores), -torch.inf)
        return len(scores)
    output = state.text[state.prompt_len : position]
    allowed = torch.from_numpy(state.constraint.allowed(output, guesses, scores.shape[-1]))
    if num_early:
        going_on = allowed[:num_early].index_fill(1, state.ends(allowed), False)
        allowed[:num_early] = torch.where(going_on.any(-1, keepdim=True), going_on, allowed[:num_early])
    scores[: len(allowed)].masked_fill_(~allowed.to(scores.device, non_blocking=True), -torch.inf)
    return len(allowed)


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
