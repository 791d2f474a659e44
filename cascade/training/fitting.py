"""Trains heads for a frozen model: how they begin, the loop, how it goes on where it was interrupted, and their files.

Knows no kind of head.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, PreTrainedModel

from cascade.engine.heads.head import Head
from cascade.training.learning import Learner, Rates

CHECKPOINT = "training.pt"  # beside the head, to go on from

Batch = Callable[[int], Tensor]  # token ids ``[rows, n]`` of a step by its number, the same ones each time
Kind = TypeVar("Kind", bound=Head)


@dataclass(frozen=True)
class Schedule(Rates):
    """How long a head is trained, and how fast."""

    steps: int
    unrolled: int = 4  # guesses after each position, of EAGLE-3
    decay: float = 0.8  # of the loss, from guess to guess
    save_every: int = 50  # steps


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of a head's own layers, like those of Llama; its hidden size is its model's."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    reads: tuple[int, ...]  # hidden states, as Transformers counts them
    num_layers: int = 1

    def config(self, network: PreTrainedModel) -> LlamaConfig:
        """Of the layers, for a head of ``network``."""
        text = network.config.get_text_config()
        return LlamaConfig(
            hidden_size=text.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=text.hidden_size // self.num_heads,
            num_hidden_layers=self.num_layers,
            rms_norm_eps=1e-6,
            vocab_size=text.vocab_size,
            max_position_embeddings=text.max_position_embeddings,
        )


@torch.no_grad()
def begun(head: Kind, network: PreTrainedModel) -> Kind:
    """``head`` on the network's device, with its last norm; what comes out is the last state that it reads."""
    modules: Any = head
    last = getattr(getattr(network.base_model, "norm", None), "weight", None)
    if isinstance(last, Tensor):
        modules.norm.weight.copy_(last)
    for layer in modules.own_layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.zero_()
    modules.fc.weight.zero_()
    modules.fc.weight[:, -network.config.get_text_config().hidden_size :].fill_diagonal_(1.0)
    return head.to(network.device)


def by_row(part: Tensor, rows: int) -> Tensor:
    """``[1, heads, rows * n, head_dim]`` as ``[rows, heads, n, head_dim]``."""
    split: Tensor = part[0].unflatten(1, (rows, -1)).transpose(0, 1)
    return split


def decayed(losses: Iterable[Tensor], decay: float) -> Tensor:
    """The mean of losses of guesses, each of which counts ``decay`` times as much as the one before."""
    weighed = [(decay**place, loss) for place, loss in enumerate(losses)]
    return torch.stack([weight * loss for weight, loss in weighed]).sum() / sum(weight for weight, _ in weighed)


def save(weights: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path, name: str = "model.safetensors") -> None:
    """The files of a head: numbers in bfloat16, and what is counted as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: (part.bfloat16() if part.is_floating_point() else part).contiguous() for key, part in weights.items()}
    save_file(kept, folder / name, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")


def fit(head: Head, loss: Callable[[Tensor], Tensor], batch: Batch, schedule: Schedule, folder: Path) -> float:
    """Train ``head``; returns the mean loss of its last steps, in nats a guess.

    ``loss`` is that of token ids ``[rows, n]``, on the head's device. Goes on from the last checkpoint in ``folder``; raises
    `ConfigError` if that is of another head.
    """
    learner, device = Learner(head, schedule, {head.vocab_size, len(head.known)}), next(head.parameters()).device
    path = folder / CHECKPOINT
    numbers = learner.resume(path) if path.exists() else {"step": 0, "mean": 0.0}
    first, mean = int(numbers["step"]), float(numbers["mean"])
    for step in (bar := tqdm(range(first, schedule.steps), desc="train", initial=first, total=schedule.steps, mininterval=5)):
        now = loss(batch(step).to(device))
        learner.learn(now, step, step / schedule.steps)
        mean = now.item() if not step else 0.95 * mean + 0.05 * now.item()
        bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
        if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps:
            learner.save(path, {"step": step + 1, "mean": mean})
    return mean
