"""The recipe of the embedded family, stage by stage; a stage whose result exists is skipped.

A small model is trained first and *grown* into the full model, which is trained further: most of its training costs a third.
What is shipped of it, and of medium, is a mean of late checkpoints, which predicts better than each of them (model soups,
Wortsman et al., arXiv 2203.05482). Medium and tiny are then distilled from the models above them, on the training text and on
text that the full model wrote, because that is the text they will have to guess. Both begin as pieces, medium of the full model
and tiny of the small one: trained from nothing, they do not learn in affordable time to copy what a text has said before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cascade.family import corpus
from cascade.family.export import export
from cascade.family.grow import grow
from cascade.family.prune import prune
from cascade.family.text import continuations
from cascade.family.train import Schedule, Stream, train

Weights = dict[str, torch.Tensor]

CONTEXT = 1024  # longest text the shipped models take, in tokens
HEAD_DIM = 32


@dataclass(frozen=True)
class Shape:
    """Size of one model; all share the head size and three query heads per key/value head, so each grows into the next."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int

    def build(self, vocab_size: int, end_id: int) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=HEAD_DIM,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=end_id,
            eos_token_id=end_id,
        )
        return LlamaForCausalLM(config)


SHAPES = {
    "seed": Shape(192, 512, 6, 6, 2),  # which the full model grows from
    "tiny": Shape(192, 384, 3, 6, 2),
    "medium": Shape(384, 320, 5, 12, 4),
    "full": Shape(384, 512, 6, 12, 4),
}
SEED = Schedule(steps=1500, decay_share=0.0, muon_lr=0.02)
FULL = Schedule(steps=1300, decay_share=0.4, muon_lr=0.015, adam_lr=2e-3, final_context=CONTEXT)
FURTHER = Schedule(steps=4000, batch_size=8, context=512, decay_share=0.6, muon_lr=0.015, adam_lr=2e-3, final_context=CONTEXT)
POLISH = Schedule(steps=160, batch_size=4, context=CONTEXT, warmup_steps=10, decay_share=0.9, muon_lr=0.002, adam_lr=2.5e-4)
FULL_MEAN = {"polish": 0.45, "polish.stable": 0.45, "further.stable": 0.1}  # checkpoints of the full model, and their shares
MEDIUM = Schedule(
    steps=4000, batch_size=8, context=512, warmup_steps=20, decay_share=0.4, muon_lr=0.02, adam_lr=2e-3, final_context=CONTEXT
)
MEDIUM_POLISH = Schedule(
    steps=320, batch_size=4, context=CONTEXT, warmup_steps=10, decay_share=0.9, muon_lr=0.008, adam_lr=8e-4
)
MEDIUM_MEAN = {"medium_polish": 0.48, "medium": 0.48, "medium.stable": 0.04}
MEDIUM_LAYERS = (0, 1, 2, 3, 5)  # of full: the five that agree most with it before any training
TINY = Schedule(steps=3900, batch_size=4, context=CONTEXT, decay_share=0.4, muon_lr=0.01, adam_lr=2e-3)
TINY_LAYERS = (0, 1, 5)  # of the seed
SAMPLED_TOKENS = 430_000
ROUNDS = 4  # times that students read the full model's text while they read the training text once


@dataclass(frozen=True)
class Recipe:
    """All stages; the folder ``work`` holds checkpoints and intermediate data."""

    work: Path
    device: str = "cpu"
    compiled: bool = False

    def run(self) -> dict[str, LlamaForCausalLM]:
        """Train whatever is missing and return the three models by name."""
        full = self.full()
        medium = self.medium(full)
        return {"tiny": self.tiny(medium, full), "medium": medium, "full": full}

    def tokenizer(self) -> PreTrainedTokenizerFast:
        folder = self.work / "tokenizer"
        if not folder.exists():
            corpus.train_tokenizer(corpus.source_files("train")).save_pretrained(folder)
        return PreTrainedTokenizerFast.from_pretrained(folder)

    def stream(self, split: corpus.Split) -> Stream:
        return self._cached(split, lambda: corpus.encode(self.tokenizer(), corpus.source_files(split)))

    def seed(self) -> LlamaForCausalLM:
        torch.manual_seed(1)
        tokenizer = self.tokenizer()
        seed = SHAPES["seed"].build(len(tokenizer), tokenizer.eos_token_id)
        return self._train("seed", seed, self.stream("train"), SEED)

    def full(self) -> LlamaForCausalLM:
        shape = SHAPES["full"]
        grown = grow(
            self.seed(),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
        )
        # The seed has read the windows of the first steps: the full model continues behind them.
        full = self._train("full", grown, self.stream("train"), FULL, skip=SEED.steps)
        full = self._train("further", full, self.stream("train"), FURTHER, skip=SEED.steps + FULL.steps)
        full = self._train("polish", full, self.stream("train"), POLISH, skip=SEED.steps + FULL.steps + FURTHER.steps)
        full.load_state_dict(self._mean(FULL_MEAN))
        return full

    def medium(self, full: LlamaForCausalLM) -> LlamaForCausalLM:
        student = prune(full, layers=MEDIUM_LAYERS, intermediate_size=SHAPES["medium"].intermediate_size)
        text = self.mixture(full)
        student = self._train("medium", student, text, MEDIUM, teacher=full)
        student = self._train("medium_polish", student, text, MEDIUM_POLISH, teacher=full, skip=MEDIUM.steps)
        student.load_state_dict(self._mean(MEDIUM_MEAN))
        return student

    def tiny(self, medium: LlamaForCausalLM, full: LlamaForCausalLM) -> LlamaForCausalLM:
        student = prune(self.seed(), layers=TINY_LAYERS, intermediate_size=SHAPES["tiny"].intermediate_size)
        return self._train("tiny", student, self.mixture(full), TINY, teacher=medium)

    def mixture(self, full: LlamaForCausalLM) -> Stream:
        """What students read, ``[num_tokens]``: the training text, and several times what the full model wrote."""
        return np.concatenate([self.stream("train"), *[self.sampled(full)] * ROUNDS])

    def sampled(self, full: LlamaForCausalLM) -> Stream:
        """About ``SAMPLED_TOKENS`` tokens that the full model wrote, each row behind 32 tokens of the training text."""
        return self._cached("sampled", lambda: sample_text(full.to(self.device), self.stream("train"), SAMPLED_TOKENS))

    def _train(
        self,
        name: str,
        model: LlamaForCausalLM,
        stream: Stream,
        schedule: Schedule,
        *,
        teacher: LlamaForCausalLM | None = None,
        skip: int = 0,
    ) -> LlamaForCausalLM:
        return train(
            model,
            stream,
            schedule,
            self.work / f"{name}.pt",
            teacher=teacher,
            device=self.device,
            label=name,
            skip=skip,
            compiled=self.compiled,
        )

    def _mean(self, shares: Mapping[str, float]) -> Weights:
        """Of checkpoints by name, each times its share."""
        loaded = {name: torch.load(self.work / f"{name}.pt", map_location="cpu", weights_only=True) for name in shares}
        return mean([(loaded[name]["model"], share) for name, share in shares.items()])

    def _cached(self, name: str, make: Callable[[], Stream]) -> Stream:
        path = self.work / f"{name}.npy"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, make())
        loaded: Stream = np.load(path)
        return loaded


def train_family(
    work: Path, out: Path, *, device: str = "cpu", threads: int | None = None, compiled: bool = True
) -> dict[str, int]:
    """Train the family in ``work``, from where an earlier call was stopped, and export it to ``out``.

    Returns each model's number of parameters. ``threads`` are torch's, as many as cores if ``None``; ``compiled`` needs a C++
    compiler and saves a fifth of the time.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    recipe = Recipe(work, device, compiled)
    models = recipe.run()
    for name, model in models.items():
        export(model, recipe.tokenizer(), out / name)
    return {name: model.num_parameters() for name, model in models.items()}


def mean(models: Sequence[tuple[Weights, float]]) -> Weights:
    """Weights of models of one shape, each times its share."""
    return {name: torch.stack([share * weights[name] for weights, share in models]).sum(0) for name in models[0][0]}


def sample_text(model: LlamaForCausalLM, stream: Stream, num_tokens: int, *, rows: int = 128, length: int = 256) -> Stream:
    """Text of the model ``[num_tokens]``: rows that begin with 32 tokens of ``stream``, at temperatures 0, 0.7 and 1."""
    rng = np.random.default_rng(0)
    written: list[Stream] = []
    for index in tqdm(range(-(-num_tokens // (rows * length))), desc="sample"):
        starts = rng.integers(0, len(stream) - 32, rows)
        prompts = torch.from_numpy(np.stack([stream[s : s + 32] for s in starts]).astype(np.int64))
        out = continuations(model, prompts, length - 32, temperature=(0.0, 0.7, 1.0)[index % 3], seed=index)
        written.append(out.numpy().astype(np.uint16).reshape(-1))
    return np.concatenate(written)
