"""From logits to own tokens, with noise that every tier shares.

    own(prefix, position) = argmax over x of  logits'(x) + G(seed, position, x)

``logits'`` are the logits after temperature, top-k, top-p and min-p; ``G`` is Gumbel noise, so the own token is an exact
sample of softmax(logits') (Gumbel 1954). Tiers that share the noise pick the same token more often than independent ones
could: Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978.

The next tokens by ``logits' + G`` are *runner-ups*: most likely one of them is the own token of a verifier that disagrees.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from cascade.cpu.leading import leading
from cascade.cpu.noise import ROOM, contenders
from cascade.engine.devices import sent
from cascade.engine.sampling.state import report, shape
from cascade.errors import reason
from cascade.messages import RUNNER_UPS
from cascade.params import SamplingParams
from cascade.scorer import Row, RunnerUp, Scored
from cascade.splitmix import GOLDEN, mix, signed

log = logging.getLogger(__name__)

TOGETHER = 2**18  # scores that are filtered at once, so that they stay in the processor's cache
UNSURE = 2.0**-20  # more than the rounding error of a sum of probabilities, see `cascade.cpu.leading`
Choice: TypeAlias = tuple[SamplingParams, int, int]  # parameters, first position, and number of own tokens
Sampled: TypeAlias = tuple[int, SamplingParams, tuple[int, int]]  # index in logits, parameters, position and mixed seed
# called with the logits of rows and their own tokens, see `cascade.engine.sampling.state.report`
Report: TypeAlias = Callable[[Tensor, Sequence[Row], list[Sequence[int]]], None]
Kernel: TypeAlias = Callable[[Tensor, Sequence[tuple[int, int, float]], int], Tensor]


def scored(logits: Tensor, rows: Sequence[Row], on_scored: Report = report) -> list[Scored]:
    """Own tokens of rows whose drafts are lines, from ``logits`` ``[sum of num_scored, V]``.

    ``on_scored`` is called like `report`. The host reads once, and twice more for each row with logprobs.
    """
    shaped, valid = shape(logits, rows)
    number = max((row.runner_ups for row in rows), default=0)
    packed = own_tokens_and_next(shaped, choices(rows), number)
    results = list(unpacked(packed.tolist(), rows, valid))
    on_scored(logits, rows, [result.own for result in results])
    return results


def choices(rows: Sequence[Row]) -> list[Choice]:
    """Parameters, first position and number of the own tokens that each row wants."""
    return [(row.params, row.start + len(row.input_ids) - (number := row.num_scored) + 1, number) for row in rows]


def unpacked(packed: list[list[int]], rows: Sequence[Row], valid: Sequence[int]) -> Iterator[Scored]:
    """Split ``packed`` ``[1 + 2 * number, sum of num_scored]``, see `with_runner_ups`, into the results of rows.

    Only the first ``valid`` own tokens of each row count.
    """
    begin = 0
    for row, count in zip(rows, valid, strict=True):
        part = slice(begin, begin + count)
        next_ = runner_ups([each[part] for each in packed], row.runner_ups) if row.runner_ups else ()
        yield Scored(packed[0][part], runner_ups=next_)
        begin += row.num_scored


def own_tokens_and_next(logits: Tensor, rows: Sequence[Choice], number: int = 0) -> Tensor:
    """Own tokens and ``number`` runner-ups for ``logits`` ``[N, V]``: int64 ``[1 + 2 * number, N]``, see `with_runner_ups`.

    They stay on the device, without a host read if that is no CPU. Each of ``rows`` is ``(params, position, n)``: the next
    ``n`` rows of logits are for ``position, position + 1, ...`` of a request with these parameters, which must have a seed.
    """
    noisy = list(sampled(rows))
    if (kernel := find_kernel(logits.device)) is not None:
        return by_kernel(kernel, logits, noisy, number)
    return by_operations(logits, noisy, number)


def by_operations(logits: Tensor, noisy: Sequence[Sampled], number: int) -> Tensor:
    """`own_tokens_and_next` by PyTorch's operations, on any device."""
    if not noisy:
        return with_runner_ups(logits, number)
    places, params, noises = zip(*noisy, strict=True)
    every, (size, device) = len(noisy) == len(logits), (logits.shape[-1], logits.device)
    some = logits if every else logits[list(places)]
    if device.type == "cpu" and number < min(ROOM, size):
        best = _best_by_bounds(some, params, noises, number)
    else:
        positions, seeds = sent(noises, device).T
        best = with_runner_ups(adjust(some, params) + gumbel(noise_bits(seeds, positions, size)), number)
    if every:
        return best
    whole = with_runner_ups(logits, number)
    whole[:, list(places)] = best
    return whole


@cache
def find_kernel(device: torch.device) -> Kernel | None:
    """`cascade.engine.sampling.kernel.own_tokens` on a GPU if it can be compiled; otherwise PyTorch's operations are used."""
    if device.type != "cuda":
        return None
    try:
        from cascade.engine.sampling.kernel import own_tokens  # Triton may be missing

        own_tokens(torch.zeros(1, 1, device=device), [(0, 0, 1.0)], 0)
    except Exception as error:  # a compiler may raise anything
        log.warning("Own tokens are chosen by PyTorch on %s, which takes longer, since Triton fails: %s", device, reason(error))
        return None
    return own_tokens


def prepare(device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
    """Decide once how own tokens are chosen on ``device``, and compile what passes of such a model need."""
    if (kernel := find_kernel(device)) is not None:
        for each in {dtype, torch.float32}:  # raw logits, and those after penalties or filters
            for number in (0, 1, RUNNER_UPS):
                kernel(torch.zeros(1, vocab_size, dtype=each, device=device), [(0, 0, 1.0)], number)


def by_kernel(kernel: Kernel, logits: Tensor, noisy: Sequence[Sampled], number: int) -> Tensor:
    """`own_tokens_and_next` by a ``kernel``, which does all but the filters."""
    noises = [(0, 0, 0.0)] * len(logits)
    places, params, _ = zip(*noisy, strict=True) if noisy else ((), (), ())
    logits, temperatures = filtered_logits(logits, places, params)
    for (place, _, noise), temperature in zip(noisy, temperatures, strict=True):
        noises[place] = (*noise, temperature)
    return kernel(logits, noises, number)


def filtered_logits(logits: Tensor, places: Sequence[int], params: Sequence[SamplingParams]) -> tuple[Tensor, list[float]]:
    """``logits`` ``[N, V]`` with the filters of ``params`` applied at the rows ``places``, and the temperature left for each.

    Rows with filters become float32 scores after temperature, whose highest is 0, so 1 is left. Other rows stay as they are.
    """
    size = logits.shape[-1]
    filtering = [at for at, own in enumerate(params) if 0 < own.top_k < size or own.top_p < 1 or own.min_p > 0]
    temperatures = [own.temperature for own in params]
    if filtering:
        index = sent([places[each] for each in filtering], logits.device)
        logits = logits.to(torch.float32, copy=True)  # `report` still reads the model's own
        logits[index] = adjust(logits[index], [params[each] for each in filtering])
        for each in filtering:
            temperatures[each] = 1.0
    return logits, temperatures


def sampled(rows: Sequence[Choice]) -> Iterator[Sampled]:
    begin = 0
    for params, position, n in rows:
        if params.temperature > 0:
            assert params.seed is not None
            seed = mixed(params.seed)
            yield from ((begin + place, params, (position + place, seed)) for place in range(n))
        begin += n


def _best_by_bounds(logits: Tensor, params: Sequence[SamplingParams], noises: Sequence[tuple[int, int]], number: int) -> Tensor:
    """`own_tokens_and_next` of ``logits`` ``[n, V]``, all of them sampled, with noise only for tokens that can win.

    The same bits as with noise for the whole vocabulary. ``noises`` are positions and mixed seeds.
    """
    logits, temperatures = filtered_logits(logits.float(), range(len(logits)), params)
    tokens, bits, kept, counts = contenders(logits, noises, temperatures, 1 + number)
    if not number and all(count == 1 for count in counts):  # as nearly always
        return tokens[:, 0][None]
    perturbed = kept + gumbel(bits)
    values, order = perturbed.sort(dim=-1, descending=True, stable=True)  # the first of equal ones, as argmax
    values, order = values[:, : 1 + number], order[:, : 1 + number]
    gaps = (values[:, :1] - values[:, 1:]).view(torch.int32).long()
    best = torch.cat([tokens.gather(1, order), gaps], 1).T
    for row, count in enumerate(counts):
        if not 0 < count <= tokens.shape[1]:  # too many are close, or the scores are not numbers
            position, seed = noises[row]
            scores = (logits[row : row + 1] - logits[row].max()) / _column(temperatures[row : row + 1], logits.device)
            noise = gumbel(noise_bits(seed, torch.tensor([position]), logits.shape[-1]))
            best[:, row] = with_runner_ups(scores + noise, number)[:, 0]
    return best


def with_runner_ups(scores: Tensor, number: int) -> Tensor:
    """Own tokens of ``scores`` ``[N, V]`` that already include noise, and the tokens with the next ``number`` of these scores.

        x_0 = argmax of scores,   x_i = argmax over x not in {x_0, ..., x_{i-1}},   gap_i = scores(x_0) - scores(x_i) >= 0

    int64 ``[1 + 2 * number, N]``, so that the host reads once, by `runner_ups`: the ``x_i``, then the bits of the float32 gaps,
    infinite for filtered tokens.
    """
    own = scores.argmax(-1)
    if not number:
        return own[None]
    scores, chosen = scores.float(), own[:, None]
    most, left = scores.gather(1, chosen), scores.scatter(1, chosen, -torch.inf)
    ids, gaps = [own], []
    for _ in range(number):
        best = left.argmax(-1, keepdim=True)
        gaps.append((most - left.gather(1, best))[:, 0].view(torch.int32).long())
        ids.append(best[:, 0])
        left.scatter_(1, best, -torch.inf)
    return torch.stack(ids + gaps)


def runner_ups(packed: Sequence[Sequence[int]], number: int) -> list[tuple[RunnerUp, ...]]:
    """The first ``number`` runner-ups in ``packed`` ``[1 + 2 * k, n]``, see `with_runner_ups`, without filtered tokens."""
    k = len(packed) // 2
    gaps = np.array(packed[1 + k : 1 + k + number], dtype=np.int32).view(np.float32).tolist()
    pairs_of = (zip(*both, strict=True) for both in zip(packed[1 : 1 + number], gaps, strict=True))
    return [tuple(RunnerUp(*pair) for pair in pairs if pair[1] < math.inf) for pairs in zip(*pairs_of, strict=True)]


def adjust(logits: Tensor, rows: Sequence[SamplingParams]) -> Tensor:
    """Logits ``[n, V]`` after temperature, top-k, top-p and min-p, in that order; float32, removed tokens are -inf.

    ``rows`` has the parameters of each, with temperatures above 0. The likeliest token always stays.
    """
    out = torch.empty(logits.shape, device=logits.device)
    together = max(1, TOGETHER // logits.shape[-1]) if logits.device.type == "cpu" else len(rows)
    for begin in range(0, len(rows), together):
        part = slice(begin, begin + together)
        out[part] = _adjusted(logits[part].float(), rows[part])
    return out


def _adjusted(scores: Tensor, rows: Sequence[SamplingParams]) -> Tensor:
    size, device = scores.shape[-1], scores.device
    scores = scores - scores.amax(-1, keepdim=True)
    scores /= _column([params.temperature for params in rows], device)
    if places := [place for place, params in enumerate(rows) if 0 < params.top_k < size or params.top_p < 1]:
        some, index = [rows[place] for place in places], sent(places, device)
        scores[index] = (filtered if device.type == "cpu" else ordered)(scores[index], some)
    if any(params.min_p > 0 for params in rows):
        # scores are relative to the likeliest token's, so p(x) < min_p * p(max) reads
        least = _column([_log(params.min_p) if params.min_p > 0 else -math.inf for params in rows], device)
        scores = scores.masked_fill(scores < least, -torch.inf)
    return scores


def _column(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return sent(numbers, device, dtype)[:, None]


def filtered(scores: Tensor, rows: Sequence[SamplingParams]) -> Tensor:
    """The same bits as `ordered` on a CPU without sorting the whole vocabulary; for rows with top-p or a smaller top-k.

    A row is sorted if a token is so near to the border that rounding could decide.
    """
    size = scores.shape[-1]
    numbers = torch.tensor([params.top_k if 0 < params.top_k < size else 0 for params in rows])
    limits = torch.tensor([params.top_p for params in rows], dtype=torch.float64)
    shares = [0.0 if number else limit for number, limit in zip(numbers.tolist(), limits.tolist(), strict=True)]
    likeliest = leading(scores, shares, numbers.tolist())
    held, order = likeliest.scores.sort(dim=-1, descending=True, stable=True)
    least = held.gather(1, (numbers - 1).clamp(0, held.shape[1] - 1)[:, None])
    held = held.masked_fill((held < least) & (numbers > 0)[:, None], -torch.inf)
    exact = held.double().exp()
    probabilities = exact / torch.where(numbers > 0, exact.sum(-1), likeliest.totals)[:, None]
    before, limit = probabilities.cumsum(-1) - probabilities, limits[:, None]
    beyond = (before >= limit) & (limit < 1)
    unsure = ((before - limit).abs() < UNSURE) & (limit < 1) & held.isfinite()
    unsure[:, 1:] |= (held[:, 1:] == held[:, :-1]) & (beyond[:, 1:] != beyond[:, :-1])  # which of them is kept is arbitrary
    out = scores.new_full((len(scores), size + 1), -torch.inf)
    out.scatter_(1, likeliest.tokens.gather(1, order), held.masked_fill(beyond, -torch.inf))
    out = out[:, :size]
    for place in (unsure.any(-1) | (torch.tensor(likeliest.counts) > likeliest.tokens.shape[1])).nonzero().flatten().tolist():
        out[place] = ordered(scores[place : place + 1], rows[place : place + 1])[0]
    return out


def ordered(scores: Tensor, rows: Sequence[SamplingParams]) -> Tensor:
    """Scores ``[n, V]``, relative to the likeliest token's, after top-k and top-p, on any device.

    Top-p keeps the smallest set of likeliest tokens whose probability reaches it (Holtzman et al., arXiv 1904.09751).
    """
    size, device = scores.shape[-1], scores.device
    exact = torch.float64 if device.type == "cpu" else torch.float32  # on a GPU one token more or less matters little
    numbers = _column([min(params.top_k or size, size) for params in rows], device, torch.int64)
    limits = _column([params.top_p for params in rows], device, exact)
    values, order = scores.sort(-1, descending=True)
    least = values.gather(1, numbers - 1)
    probabilities = values.masked_fill(values < least, -torch.inf).softmax(-1, dtype=exact)
    before = probabilities.cumsum(-1) - probabilities
    beyond = (before >= limits) & (limits < 1)  # never the likeliest, which has none before it
    return scores.masked_fill((scores < least) | torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise float32 of `noise_bits`."""
    uniform = bits.to(torch.float32) * 2.0**-53
    # -log(uniform) is precise where uniform is near 1; the tokens that win have it near 0
    exponential = -torch.log1p(-uniform.clamp(2.0**-54, 1 - 2.0**-24))
    return -exponential.log()


def noise_bits(seeds: int | Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Uniform integers ``[n, vocab_size]`` from 0 to 2^53 - 1, int64, the same on every device.

    ``seeds`` is one `mixed` seed or ``[n]``. The generator is counter-based: SplitMix64 (Steele, Lea, Flood 2014) started at a
    hash of seed and position and read at the token id.
    """
    key = _mix(_mix(positions + signed(GOLDEN)) ^ seeds)
    ids = torch.arange(1, vocab_size + 1, device=positions.device)
    return _shift(_mix(key[:, None] + ids * signed(GOLDEN)), 11)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors, whose products wrap around on every device."""
    z = (z ^ _shift(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def mixed(z: int) -> int:
    """SplitMix64's finaliser on one Python integer, such as a seed."""
    return signed(mix(z))


@lru_cache(1024)
def _log(share: float) -> float:
    """The logarithm in float32, like scores."""
    return torch.tensor(share).log().item()


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
