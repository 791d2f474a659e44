"""Trains an EAGLE-3 head for a model, on given text or on text that the model writes itself, and writes it as such heads are
published.

A head is trained on what it meets when it serves: after the text its own output takes the place of hidden states. So each
position of a text is unrolled for some guesses ("training-time test"): at step k the head reads the token at i + 1 + k and its
own output of step k - 1, attends to the hidden states up to i and to its own steps, and predicts the token after that.

    loss = sum_k decay^k * cross entropy of softmax(logits_k) against the model's distribution over the head's tokens

Li et al., "EAGLE-3", arXiv 2503.01840.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, PreTrainedModel

from cascade.engine.checkpoint import SINGLE
from cascade.engine.heads.eagle import Eagle3, Verifier
from cascade.engine.loading import load
from cascade.engine.model import Model
from cascade.engine.model_config import context_len
from cascade.engine.published_tokenizer import pretrained
from cascade.errors import ConfigError
from cascade.training import writing
from cascade.training.learning import Learner, Rates, mixed_precision
from cascade.training.text import read
from cascade.training.versions import replacing

CHECKPOINT = "training.pt"  # beside the head, to go on from
OWN_TEXT = "text.npy"  # beside the head

Batch = Callable[[int], Tensor]  # token ids ``[rows, n]`` of a step by its number, the same ones each time


@dataclass(frozen=True)
class Schedule(Rates):
    """How long a head is trained, how fast, and on how much at once."""

    steps: int
    batch_size: int = 8
    context: int = 128  # tokens of a row
    vocab_size: int = 32_768  # tokens that it knows at most, the most frequent ones of the text
    text_tokens: int = 300_000  # that the model writes where no files are given
    unrolled: int = 4  # guesses after each position
    decay: float = 0.8  # of the loss, from guess to guess
    save_every: int = 50  # steps


class Unrolled:
    """Attention of rows of texts that are unrolled: nothing is stored but for the one step of training."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._steps: list[tuple[Tensor, Tensor]] = []  # keys and values

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `cascade.engine.heads.eagle.Attend`; rows lie one after another."""
        group = query.shape[1] // key.shape[1]
        parts = (query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
        query, key, value = (part[0].unflatten(1, (self._rows, -1)).transpose(0, 1) for part in parts)
        self._steps.append((key, value))
        (keys, values), *later = self._steps
        seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
        scores = [(query @ keys.transpose(2, 3)).masked_fill(~seen, -torch.inf)]
        scores += [(query * own).sum(-1, keepdim=True) for own, _ in later]
        weights = (torch.cat(scores, -1).float() * query.shape[3] ** -0.5).softmax(-1).to(value.dtype)
        n = keys.shape[2]
        out = weights[..., :n] @ values
        for place, (_, own) in enumerate(later):
            out = out + weights[..., n + place, None] * own
        whole: Tensor = out.transpose(1, 2).flatten(0, 1)[None]
        return whole


def train(source: str, files: Sequence[Path], out: Path, schedule: Schedule, *, device: str | None = None) -> float:
    """Train a head for the model at ``source``, a path or hub id, and write it to ``out``.

    Without ``files`` the model writes the text itself. Goes on where it was interrupted. Returns the mean loss of the last
    steps, nats a guess; raises `ConfigError` if files cannot be read or are too short, or if another head was trained in
    ``out``, `ModelError` if the model cannot be loaded.
    """
    if files:
        tokens = torch.tensor([token for text in read(pretrained(source), files) for token in text])
    else:
        tokens = _own_text(source, device, schedule.text_tokens, out / OWN_TEXT)
    network = load(source, device=device).requires_grad_(False)
    context = min(schedule.context, context_len(network.config))
    if len(tokens) <= context:
        raise ConfigError(f"The text has {len(tokens)} tokens: give more than the {context} of one row")

    def batch(step: int) -> Tensor:
        starts = np.random.default_rng(step).integers(0, len(tokens) - context, schedule.batch_size)
        return torch.stack([tokens[start : start + context] for start in starts])

    counts = torch.bincount(tokens)
    known = counts.argsort(descending=True, stable=True)[: min(schedule.vocab_size, int((counts > 0).sum()))]
    return fit(network, new_head(network, known.sort().values.tolist()), batch, schedule, out)


def _own_text(source: str, device: str | None, wanted: int, kept: Path) -> Tensor:
    """Conversations that the model writes, one after another, ``[tokens]`` int64; those of an earlier call if there are any."""
    if kept.exists():
        return torch.from_numpy(np.load(kept))
    network, tokenizer = load(source, device=device), pretrained(source)
    turns = writing.Turns.of(tokenizer, writing.end_tokens(network, tokenizer))
    tokens: list[int] = []
    with tqdm(total=wanted, desc="write", unit="token", mininterval=5) as bar:
        for text in writing.write(Model(network, owned=True), turns, writing.own_prompts(turns)):
            tokens += text.tokens
            bar.update(len(text.tokens))
            if len(tokens) >= wanted:
                break
    with replacing(kept) as file:
        np.save(file, np.asarray(tokens))
    return torch.tensor(tokens)


def fit(network: PreTrainedModel, head: Eagle3, batch: Batch, schedule: Schedule, folder: Path) -> float:
    """Train ``head`` for ``network`` and write it to ``folder``; returns the mean loss of its last steps, in nats a guess.

    Goes on from the last checkpoint in ``folder``; raises `ConfigError` if that is of another head.
    """
    learner, path = Learner(head, schedule, {head.vocab_size, len(head.known)}), folder / CHECKPOINT
    numbers = learner.resume(path) if path.exists() else {"step": 0, "mean": 0.0}
    first, mean = int(numbers["step"]), float(numbers["mean"])
    for step in (bar := tqdm(range(first, schedule.steps), desc="train", initial=first, total=schedule.steps, mininterval=5)):
        now = loss(network, head, batch(step).to(network.device), schedule)
        learner.learn(now, step, step / schedule.steps)
        mean = now.item() if not step else 0.95 * mean + 0.05 * now.item()
        bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
        if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps:
            learner.save(path, {"step": step + 1, "mean": mean})
    write(head, folder)
    return mean


@torch.no_grad()
def new_head(network: PreTrainedModel, tokens: Sequence[int]) -> Eagle3:
    """An untrained head that knows ``tokens``, increasing. Its one layer is as large as those of ``network``.

    It reads a low, a middle and a high hidden state. Its last norm and output embedding are the model's; at first it passes
    the last state on.
    """
    torch.manual_seed(0)
    text, ids = network.config.get_text_config(), torch.tensor(tokens)
    layers = text.num_hidden_layers
    config = LlamaConfig(
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=text.hidden_size // text.num_attention_heads,
        num_hidden_layers=1,
        rms_norm_eps=1e-6,
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
    )
    reads = tuple(sorted({min(2, layers), layers // 2, max(1, layers - 3)})) if layers > 4 else (1, layers)
    head = Eagle3(config, Verifier.of(network), reads=reads, ids=ids)
    head.lm_head.weight.copy_(network.get_output_embeddings().weight[ids])
    last = getattr(getattr(network.base_model, "norm", None), "weight", None)
    if isinstance(last, Tensor):
        head.norm.weight.copy_(last)
    [layer] = head.layers
    for part in (layer.self_attn.o_proj, layer.mlp.down_proj, head.fc):
        part.weight.zero_()
    head.fc.weight[:, -head.config.hidden_size :].fill_diagonal_(1.0)
    return head.to(network.device)


def loss(network: PreTrainedModel, head: Eagle3, ids: Tensor, schedule: Schedule) -> Tensor:
    """Mean nats per guess over ``ids`` ``[rows, n]``, those further ahead counting less."""
    n = ids.shape[1] - schedule.unrolled
    with mixed_precision(ids.device):
        with torch.no_grad():
            said = network(ids, output_hidden_states=True, use_cache=False)
            known = torch.tensor(head.known, device=ids.device)
            wanted = said.logits[:, 1:, known].float().softmax(-1)
        losses = (
            F.cross_entropy(logits.float(), wanted[:, step : step + n].flatten(0, 1))
            for step, logits in enumerate(unroll(head, said.hidden_states, ids, schedule.unrolled))
        )
        weighed = [(schedule.decay**place, loss) for place, loss in enumerate(losses)]
        return torch.stack([weight * loss for weight, loss in weighed]).sum() / sum(weight for weight, _ in weighed)


def unroll(head: Eagle3, hidden: Sequence[Tensor], ids: Tensor, steps: int) -> Iterator[Tensor]:
    """What a head says at each step after each of the first positions of ``ids`` ``[rows, n]``.

    That are the first ``n - steps``: ``[rows * (n - steps), tokens]``. ``hidden`` are all hidden states of the model.
    """
    rows, n = ids.shape[0], ids.shape[1] - steps
    states = head.state([hidden[layer][:, :n].flatten(0, 1) for layer in head.reads])
    attend = Unrolled(rows)
    positions = torch.arange(n, device=ids.device).repeat(rows)[None]
    for step in range(steps):
        tokens = ids[:, 1 + step : 1 + step + n].flatten()
        out = head(tokens, states, positions + step, attend)
        yield head.logits(out)
        states = head.next_state(out)


def write(head: Eagle3, folder: Path) -> None:
    """The head's files, numbers in bfloat16; ids of hidden states count as those of the ``speculators`` library."""
    ids = torch.tensor(head.known)
    config = head.config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(ids),
        "eagle_aux_hidden_state_layer_ids": list(head.reads),
    }
    weights = {name: part.bfloat16().contiguous() for name, part in head.state_dict().items()}
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = torch.zeros(head.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
