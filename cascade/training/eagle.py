"""Trains an EAGLE-3 head for a model, and writes it as such heads are published.

A head is trained on what it will meet: after the text its own output takes the place of hidden states. So each position of a
text is unrolled for some guesses ("training-time test"): at step k it reads the token at i + 1 + k and its own output of step
k - 1, attends to the hidden states up to i and to its own steps, and is to say what the model says after that token.

    loss = sum_k decay^k * cross entropy of softmax(logits_k) against the model's distribution over the head's tokens

Li et al., "EAGLE-3", arXiv 2503.01840.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, PreTrainedModel

from cascade.engine.checkpoint import SINGLE
from cascade.engine.heads.eagle import Eagle3
from cascade.engine.heads.head import Verifier
from cascade.training.learning import Learner, Rates, mixed_precision

CHECKPOINT = "training.pt"  # beside the head, to go on from

Batch = Callable[[int], Tensor]  # token ids ``[rows, n]`` of a step by its number, the same ones each time


@dataclass(frozen=True)
class Schedule(Rates):
    """How long a head is trained, and how fast."""

    steps: int
    unrolled: int = 4  # guesses after each position
    decay: float = 0.8  # of the loss, from guess to guess
    save_every: int = 50  # steps


@dataclass(frozen=True, kw_only=True)
class EagleShape:
    """Size of a head's one layer, like those of Llama; its hidden size is its model's."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    reads: tuple[int, ...]  # hidden states, as Transformers counts them
    tokens: tuple[int, ...]  # that it knows, increasing

    def config(self, network: PreTrainedModel) -> LlamaConfig:
        """Of the layer, for a head of ``network``."""
        text = network.config.get_text_config()
        return LlamaConfig(
            hidden_size=text.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=text.hidden_size // self.num_heads,
            num_hidden_layers=1,
            rms_norm_eps=1e-6,
            vocab_size=text.vocab_size,
            max_position_embeddings=text.max_position_embeddings,
        )


class Unrolled:
    """Attention of rows of texts that are unrolled: nothing is stored but for the one step of training."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._steps: dict[int, list[tuple[Tensor, Tensor]]] = {}  # keys and values by layer, step after step

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, planned: Any) -> Tensor:
        """See `Reader.attend`; rows lie one after another."""
        group = query.shape[1] // key.shape[1]
        parts = (query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
        query, key, value = (part[0].unflatten(1, (self._rows, -1)).transpose(0, 1) for part in parts)
        steps = self._steps.setdefault(int(module.layer_idx), [])  # type: ignore[arg-type]
        steps.append((key, value))
        (keys, values), *later = steps
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


def train_eagle3(network: PreTrainedModel, batch: Batch, shape: EagleShape, schedule: Schedule, folder: Path) -> float:
    """Train a head for ``network`` and write it to ``folder``; returns the mean loss of its last steps, in nats a guess.

    Goes on from the last checkpoint in ``folder``; raises `ConfigError` if that is of another head.
    """
    torch.manual_seed(0)
    head = new_head(network, shape)
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
    write(head, shape, folder)
    return mean


@torch.no_grad()
def new_head(network: PreTrainedModel, shape: EagleShape) -> Eagle3:
    """An untrained head, whose last norm and projection to its tokens are the model's; what comes out is the last state."""
    verifier, ids = Verifier.of(network), torch.tensor(shape.tokens)
    head = Eagle3(shape.config(network), verifier, reads=shape.reads, ids=ids)
    head.lm_head.weight.copy_(network.get_output_embeddings().weight[ids])
    last = getattr(getattr(network.base_model, "norm", None), "weight", None)
    if isinstance(last, Tensor):
        head.norm.weight.copy_(last)
    [layer] = head.own_layers
    for part in (layer.self_attn.o_proj, layer.mlp.down_proj, head.fc):
        part.weight.zero_()
    head.fc.weight[:, -head.width :].fill_diagonal_(1.0)
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
    place: Any = Unrolled(rows)
    positions = torch.arange(n, device=ids.device).repeat(rows)[None]
    for step in range(steps):
        tokens = ids[:, 1 + step : 1 + step + n].flatten()
        out = head(tokens, states, positions + step, place, None)
        yield head.logits(out)
        states = head.next_state(out)


def write(head: Eagle3, shape: EagleShape, folder: Path) -> None:
    """The head's files, numbers in bfloat16; ids of hidden states count as those of the ``speculators`` library."""
    ids = torch.tensor(shape.tokens)
    known = torch.zeros(head.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    config = head.config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(ids),
        "eagle_aux_hidden_state_layer_ids": list(shape.reads),
    }
    weights = {name: part.bfloat16().contiguous() for name, part in head.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    places = {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    save_file(weights | places, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
