"""One resumable training loop for the family: next-token cross-entropy, or distillation from a teacher's logits.

Hidden matrices are trained by Muon, embeddings and norms by AdamW. The learning rate rises, stays, and falls linearly
to zero over the last part of the run (warm-up, stable, decay), so a run can be prolonged from any checkpoint that was saved
before the decay.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

Stream = npt.NDArray[np.uint16]

# Rows are never padded, so the kernel's own causal mode suffices. Under torch.compile Transformers would build a mask
# instead, which costs a fifth of the step.
CAUSAL = "cascade_causal"
AttentionInterface.register(CAUSAL, sdpa_attention_forward)
AttentionMaskInterface.register(CAUSAL, lambda *args, **kwargs: None)


@dataclass(frozen=True)
class Schedule:
    """Length and learning rates of one run."""

    steps: int
    batch_size: int = 16
    context: int = 256  # tokens per row
    muon_lr: float = 0.01
    adam_lr: float = 3e-3
    warmup_steps: int = 50
    decay_share: float = 0.3  # share of the steps over which the learning rate falls to zero
    final_context: int | None = None  # tokens per row during the decay, so that positions beyond `context` are seen

    @property
    def decay_start(self) -> int:
        return self.steps - int(self.steps * self.decay_share)

    def lr_factor(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return warm * min(1.0, (self.steps - step) / max(1, self.steps - self.decay_start))

    def rows_at(self, step: int) -> tuple[int, int]:
        """Rows and tokens per row of a step; the number of tokens per step stays the same."""
        if self.final_context is None or step < self.decay_start:
            return self.batch_size, self.context
        return max(1, self.batch_size * self.context // self.final_context), self.final_context


def batches(stream: Stream, schedule: Schedule, first_step: int, skip: int = 0) -> Iterator[torch.Tensor]:
    """Ids ``[rows, context + 1]`` of each step from ``first_step`` on; a step's rows depend on its number alone.

    An epoch visits every window once, in random order and cut at a random offset; ``skip`` starts that many steps into it.
    """
    for step in range(first_step, schedule.steps):
        rows, context = schedule.rows_at(step)
        num_windows = (len(stream) - 2 * context) // context
        per_epoch = num_windows // rows
        epoch, index = divmod(step + skip, per_epoch)
        rng = np.random.default_rng([context, epoch])
        offset = int(rng.integers(context))
        chosen = rng.permutation(num_windows)[index * rows : (index + 1) * rows]
        windows = [stream[offset + w * context : offset + (w + 1) * context + 1] for w in chosen]
        yield torch.from_numpy(np.stack(windows).astype(np.int64))


def train(
    model: LlamaForCausalLM,
    stream: Stream,
    schedule: Schedule,
    checkpoint: Path,
    *,
    teacher: LlamaForCausalLM | None = None,
    device: str = "cpu",
    label: str = "train",
    skip: int = 0,
    save_every: int = 100,
    compiled: bool = False,
) -> LlamaForCausalLM:
    """Train ``model`` in place and return it; continues from ``checkpoint`` if that file exists.

    With a teacher the loss is the cross-entropy against the teacher's distribution (forward KL up to a constant,
    Hinton, Vinyals, Dean, arXiv 1503.02531), which is what agreement between neighbouring tiers needs.
    """
    model.to(device).train()
    models = [model] if teacher is None else [model, teacher.to(device).eval()]
    loss_of = torch.compile(_loss, dynamic=False) if compiled else _loss
    optimizers = _optimizers(model, schedule)
    first_step = _resume(checkpoint, model, optimizers)
    progress = tqdm(total=schedule.steps, initial=first_step, desc=label, mininterval=5.0, dynamic_ncols=True)
    mean_loss = math.nan
    with _causal(models), progress:
        for step, ids in enumerate(batches(stream, schedule, first_step, skip), start=first_step):
            loss = loss_of(model, teacher, ids.to(device))
            loss.backward()
            _update(model, optimizers, schedule, step)
            mean_loss = loss.item() if math.isnan(mean_loss) else 0.98 * mean_loss + 0.02 * loss.item()
            progress.set_postfix(loss=f"{mean_loss:.3f}", refresh=False)
            progress.update()
            if (step + 1) % save_every == 0 or step + 1 in (schedule.steps, schedule.decay_start):
                _save(checkpoint, model, optimizers, step + 1)
                if step + 1 == schedule.decay_start:
                    _save(checkpoint.with_suffix(".stable.pt"), model, optimizers, step + 1)
    return model.eval()


@contextmanager
def _causal(models: list[LlamaForCausalLM]) -> Iterator[None]:
    """Attention of ``models`` without a mask tensor, for as long as the context lasts; see ``CAUSAL``."""
    for model in models:
        model.set_attn_implementation(CAUSAL)
    try:
        yield
    finally:
        for model in models:
            model.set_attn_implementation("sdpa")


def _update(model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], schedule: Schedule, step: int) -> None:
    """Step the optimizers by the gradients, and clear these."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, lr in zip(optimizers, (schedule.muon_lr, schedule.adam_lr), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule.lr_factor(step)
        optimizer.step()
        optimizer.zero_grad()


def _loss(model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, ids: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats per token over ``ids`` ``[rows, context + 1]``."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(inputs, use_cache=False).logits.flatten(0, 1)
        if teacher is None:
            return F.cross_entropy(logits.float(), targets.flatten())
        with torch.no_grad():
            wanted = teacher(inputs, use_cache=False).logits.flatten(0, 1).float().softmax(-1)
        return F.cross_entropy(logits.float(), wanted)


def _optimizers(model: LlamaForCausalLM, schedule: Schedule) -> list[torch.optim.Optimizer]:
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(hidden, lr=schedule.muon_lr, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=schedule.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _save(path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    state = {"step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    torch.save(state, partial)
    os.replace(partial, path)  # a kill while saving leaves the previous checkpoint whole


def _resume(path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])
