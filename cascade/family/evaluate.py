"""How good the family is: nats per token on held-out files, and how often a tier's own token is that of the tier above.

Every figure is a mean over teacher-forced positions of a text. Texts are held-out files, and what an upper model itself
writes behind the beginnings of held-out files. Weights are cast to float32, so that the figures do not depend on a machine's
bfloat16 kernels.
"""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from cascade.family import NAMES, WEIGHTS, corpus
from cascade.family.text import continuations
from cascade.family.train import Stream

CONTEXT = 1024  # tokens per row of a held-out text
PROMPT, WRITTEN = 128, 192  # tokens per row of a written text
TEMPERATURES = (0.7, 1.0)
TEST_FOLDERS = {"test", "tests", "idle_test"}
JUDGED_ROWS = 4  # rows of logits in memory at a time
ACCEPTANCE_EVERY = 16  # acceptance sorts the vocabulary at every position; a sixteenth of them is enough of a sample


@dataclass(frozen=True)
class Text:
    """Rows ``[num_rows, length]`` int64; the tokens behind the first ``prompt`` ones of each are judged."""

    rows: torch.Tensor
    prompt: int = 1


def evaluate_family(folder: Path = WEIGHTS, *, device: str = "cpu", num_prompts: int = 64) -> dict[str, Any]:
    """Losses of each model and agreement and acceptance of each edge, as plain numbers by name.

    ``models[name]`` has ``loss`` on all held-out files and ``loss_library`` on those that are no tests, both in nats per
    token; ``edges["tiny->medium"][text]`` has ``agreement`` (share of equal argmaxes) and, per temperature, the
    acceptance of the shared-noise rule (``coupled``) and of the ratio rule (``ratio``).
    """
    models = load(folder, device)
    tokenizer = AutoTokenizer.from_pretrained(folder / "full")
    held_out = as_rows(corpus.encode(tokenizer, corpus.source_files("held_out")), CONTEXT)
    library = as_rows(corpus.encode(tokenizer, library_files()), CONTEXT)
    starts = np.random.default_rng(0).choice(len(held_out), num_prompts, replace=len(held_out) < num_prompts)
    prompts = held_out[torch.from_numpy(starts), :PROMPT]
    texts = {"held_out": Text(held_out)}
    for writer, temperature in (("full", 0.0), ("medium", 0.0), *(("full", t) for t in TEMPERATURES)):
        rows = continuations(models[writer], prompts, WRITTEN, temperature=temperature)
        texts[f"by_{writer}_{temperature:g}"] = Text(rows, PROMPT)
    return {
        "models": {
            name: {
                "parameters": sum(p.numel() for p in model.parameters()),
                "loss": loss(model, held_out),
                "loss_library": loss(model, library),
            }
            for name, model in models.items()
        },
        "edges": edges(models, texts),
    }


def load(folder: Path, device: str = "cpu") -> dict[str, LlamaForCausalLM]:
    """The models of a family folder by name, bottom to top, in float32."""
    return {name: AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).to(device).eval() for name in NAMES}


def library_files() -> list[Path]:
    """Held-out files that are in no folder of tests."""
    return [p for p in corpus.source_files("held_out") if not TEST_FOLDERS & set(p.parts)]


def as_rows(stream: Stream, length: int) -> torch.Tensor:
    """A stream cut into rows ``[num_rows, length]`` int64, without the rest that does not fill a row."""
    return torch.from_numpy(stream[: len(stream) // length * length].astype(np.int64)).view(-1, length)


@torch.inference_mode()
def loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Mean nats per token over all tokens of ``rows`` but each row's first."""
    total = 0.0
    for part in rows.to(model.device).split(JUDGED_ROWS):
        logits = model(part, use_cache=False).logits[:, :-1]
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return total / rows[:, 1:].numel()


@torch.inference_mode()
def edges(models: dict[str, LlamaForCausalLM], texts: dict[str, Text]) -> dict[str, dict[str, dict[str, float]]]:
    """The mean of each measure on each text, for each pair of models, the lower one first."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for label, text in texts.items():
        sums: dict[str, dict[str, list[float]]] = {}
        for part in tqdm(text.rows.split(JUDGED_ROWS), desc=f"judge {label}"):
            logits = {n: m(part.to(m.device), use_cache=False).logits[:, text.prompt - 1 : -1] for n, m in models.items()}
            for low, high in combinations(models, 2):
                values = sums.setdefault(f"{low}->{high}", {})
                for measure, value in compare(logits[low].flatten(0, 1), logits[high].flatten(0, 1)).items():
                    values.setdefault(measure, []).append(value)
        for edge, values in sums.items():
            result.setdefault(edge, {})[label] = {m: float(np.mean(v)) for m, v in values.items()}
    return result


def compare(draft: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """Measures of one edge, averaged over positions, from the logits ``[positions, vocab]`` of its two models."""
    measures = {"agreement": (draft.argmax(-1) == target.argmax(-1)).float().mean().item()}
    for temperature in TEMPERATURES:
        q, p = (x[::ACCEPTANCE_EVERY].double().div(temperature).softmax(-1) for x in (draft, target))
        measures[f"coupled_{temperature:g}"] = coupled_acceptance(p, q).mean().item()
        measures[f"ratio_{temperature:g}"] = torch.minimum(p, q).sum(-1).mean().item()
    return measures


def coupled_acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Probability ``[...]`` that two tiers with the same noise pick the same token; ``p``, ``q`` are theirs, ``[..., vocab]``.

    ``sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)`` (Daliri, Musco, Suresh, arXiv 2408.07978). The maximum is the first one
    where ``p_j / q_j >= p_i / q_i``, so with tokens sorted by that ratio the inner sums are cumulative sums.
    """
    tiny = torch.finfo(p.dtype).tiny
    order = (p.clamp_min(tiny).log() - q.clamp_min(tiny).log()).argsort(-1)
    p, q = p.gather(-1, order).clamp_min(tiny), q.gather(-1, order).clamp_min(tiny)
    below = q.cumsum(-1) - q
    above = p.flip(-1).cumsum(-1).flip(-1)
    return (1 / (above / p + below / q)).sum(-1)
