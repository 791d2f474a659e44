"""Small random heads in the formats that they are published in, and what their papers' formulas say, without any cache."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from cascade.engine.sampling.own_tokens import own_tokens
from cascade.params import SamplingParams
from tests import block_heads
from tests.architectures import VOCAB
from tests.block_heads import EPSILON, HEADS, KNOWN, Weights, layer, matrix, norm, over

SIZE = 32
MASK, PARALLEL = 90, 5  # of P-EAGLE: a token, and guesses


@dataclass
class Made:
    """A head that was written to ``folder``, under the names of one format."""

    kind: str
    weights: Weights
    config: dict[str, Any]
    folder: Path
    reads: tuple[int, ...] = ()  # as Transformers counts hidden states
    out: Callable[[PreTrainedModel, Sequence[int], Tensor], Tensor] | None = None  # of a layer of the model's own kind
    style: str = ""  # of a drafter of blocks

    @property
    def most(self) -> int:
        """Guesses after a text."""
        return {"medusa": 3, "dflash": block_heads.BLOCK - 1, "dspark": block_heads.BLOCK, "peagle": PARALLEL}.get(
            self.kind, 99
        )

    def write(self, file: str = "model.safetensors", **changes: Any) -> str:
        """Its files; ``changes`` are of its configuration."""
        self.folder.mkdir(parents=True, exist_ok=True)
        weights = dict(self.weights)
        if (mask := weights.pop("mask_embedding", None)) is not None:
            torch.save({"mask_token_id": block_heads.MASK, "embedding": mask}, self.folder / "mask_embedding.pt")
        if file.endswith(".safetensors"):
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, self.folder / file)
        else:
            torch.save(weights, self.folder / file)
        (self.folder / "config.json").write_text(json.dumps({**self.config, **changes}))
        return str(self.folder)


def medusa(folder: Path, *, blocks: int = 3, seed: int = 0, vllm: bool = False) -> Made:
    """As its authors write it, or as vLLM does."""
    noise = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for block in range(blocks):
        names = (
            (f"blocks.{block}.layers.0.weight", f"lm_heads.{block}.weight")
            if vllm
            else (f"{block}.0.linear.weight", f"{block}.1.weight")
        )
        weights[names[0]] = matrix(noise, SIZE, SIZE)
        weights[names[1]] = matrix(noise, VOCAB, SIZE)
        if not vllm:
            weights[f"{block}.0.linear.bias"] = matrix(noise, SIZE)
    return Made("medusa", weights, {"medusa_num_heads": 2, "medusa_num_layers": 1}, folder)  # which are 3


def eagle(folder: Path, *, seed: int = 0) -> Made:
    """With the verifier's embedding again, and its number of layers."""
    noise = torch.Generator().manual_seed(seed)
    weights = layer(noise, "layers.0.", SIZE, SIZE) | {
        "fc.weight": matrix(noise, SIZE, 2 * SIZE),
        "fc.bias": matrix(noise, SIZE),
    }
    weights["embed_tokens.weight"] = matrix(noise, VOCAB, SIZE)
    config = {"num_attention_heads": HEADS, "num_hidden_layers": 40, "vocab_size": VOCAB, "rms_norm_eps": EPSILON}
    return Made("eagle", weights, config, folder)


def eagle3(folder: Path, *, seed: int = 0, style: str = "yuhuili", size: int = SIZE) -> Made:
    """Of the authors, of SpecForge, which names the layers whose outputs it reads, or of the ``speculators`` library."""
    noise = torch.Generator().manual_seed(seed)
    name = "midlayer." if style != "speculators" else "layers.0."
    weights = layer(noise, name, 2 * size, size) | {"fc.weight": matrix(noise, size, 3 * SIZE)}
    weights["lm_head.weight"] = matrix(noise, KNOWN, size)
    for norm_of in (f"{name}input_layernorm", f"{name}hidden_norm", "norm"):
        weights[f"{norm_of}.weight"] = 1 + 0.1 * matrix(noise, size)
    ids = torch.randperm(VOCAB, generator=noise)[:KNOWN].sort().values
    weights["d2t"] = ids - torch.arange(KNOWN)
    weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    inner = {"num_attention_heads": HEADS, "num_hidden_layers": 40, "vocab_size": VOCAB, "rms_norm_eps": EPSILON}
    made = Made("eagle3", weights, {**inner, "draft_vocab_size": KNOWN, "max_position_embeddings": 16}, folder)
    if style == "specforge":
        made.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
        made.reads = (1, 3, 4)
    if style == "speculators":
        weights["embed_tokens.weight"] = matrix(noise, VOCAB, size)
        weights["input_norm.weight"] = 1 + 0.1 * matrix(noise, 3 * SIZE)
        options = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
        made.config = {"transformer_layer_config": inner, "eagle_aux_hidden_state_layer_ids": [1, 2, 5], **options}
        made.reads = (1, 2, 5)
    return made


def peagle(folder: Path, *, style: str) -> Made:
    """Of the ``speculators`` library, or as vLLM takes it."""
    made, noise = eagle3(folder, seed=1, style=style or "yuhuili"), torch.Generator().manual_seed(2)
    hidden = matrix(noise, 3 * SIZE)
    made.kind, made.weights["mask_hidden"] = "peagle", hidden[None, None] if style else hidden[None]
    depth = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": PARALLEL}]}
    made.config |= {"mask_token_id" if style else "ptd_token_id": MASK, "speculators_config": depth}
    return made


def make(style: str, folder: Path) -> Made:
    """One of a kind, such as "eagle3", or of a variant, such as "eagle3-speculators"."""
    kind, _, variant = style.partition("-")
    if kind in ("dflash", "dspark"):
        weights, config = block_heads.published(style, torch.Generator().manual_seed(0), SIZE)
        return Made(kind, weights, config, folder, style=style)
    if kind == "peagle":
        return peagle(folder, style=variant)
    if kind == "medusa":
        return medusa(folder, vllm=variant == "vllm")
    return eagle(folder) if kind == "eagle" else eagle3(folder, style=variant or "yuhuili")


# the formulas


@dataclass
class Paper:
    """What a head guesses after a text, computed anew for each guess by the formulas of its paper."""

    made: Made
    verifier: PreTrainedModel  # with Transformers' own attention
    logits: list[Tensor] = field(default_factory=list)  # of the last guesses, over all tokens
    sure: list[float] = field(default_factory=list)  # of them, where a head says it

    def __post_init__(self) -> None:
        self.weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in self.made.weights.items()}

    @torch.no_grad()
    def guesses(self, text: Sequence[int], number: int, params: SamplingParams) -> list[int]:
        """Tokens after ``text``, the last token of which the verifier has not read."""
        out = self.verifier(torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False)
        hidden = [state[0] for state in out.hidden_states]
        ways = {"medusa": self._medusa, "eagle": self._eagle, "eagle3": self._eagle3, "peagle": self._peagle, "mtp": self._mtp}
        made = ways.get(self.made.kind, self._of_a_block)
        self.logits, self.sure = [], []
        return made(list(text), hidden, number, params)

    def _pick(self, logits: Tensor, params: SamplingParams, position: int) -> int:
        self.logits.append(logits)
        return int(own_tokens(logits[None], [(params, position, 1)])[0])

    def _of_a_block(self, text: list[int], hidden: Sequence[Tensor], number: int, params: SamplingParams) -> list[int]:
        def pick(logits: Tensor, place: int) -> int:
            return self._pick(logits, params, len(text) + place)

        return block_heads.guesses((self.made.style, self.weights), text, hidden, self.verifier, number, pick, self.sure)

    def _medusa(self, text: list[int], hidden: Sequence[Tensor], number: int, params: SamplingParams) -> list[int]:
        last, found, w = hidden[-1][-1], [], self.weights
        for k in range(min(number, 3)):
            if f"{k}.0.linear.weight" in w:
                x = last + F.silu(w[f"{k}.0.linear.weight"] @ last + w[f"{k}.0.linear.bias"])
                logits = w[f"{k}.1.weight"] @ x
            else:
                logits = w[f"lm_heads.{k}.weight"] @ (last + F.silu(w[f"blocks.{k}.layers.0.weight"] @ last))
            found.append(self._pick(logits, params, len(text) + k))
        return found

    def _eagle(self, text: list[int], hidden: Sequence[Tensor], number: int, params: SamplingParams) -> list[int]:
        w, states = self.weights, hidden[-1]
        embedding, lm_head = self.verifier.get_input_embeddings(), self.verifier.get_output_embeddings()
        for _ in range(number):
            x = F.linear(torch.cat([embedding(torch.tensor(text[1:])), states], -1), w["fc.weight"], w["fc.bias"])
            out = self._over(x, x)
            text.append(self._pick(lm_head(out[-1]), params, len(text)))
            states = torch.cat([states, out[-1:]])
        return text[-number:]

    def _eagle3(self, text: list[int], hidden: Sequence[Tensor], number: int, params: SamplingParams) -> list[int]:
        w, config, states = self.weights, self.made.config, self._read(hidden)
        for _ in range(number):
            out = self._eagle3_layer(text[1:], states)[-1:]
            text.append(self._pick(self._eagle3_logits(out[0]), params, len(text)))
            states = torch.cat([states, norm(out, w["norm.weight"]) if config.get("norm_output") else out])
        return text[-number:]

    def _peagle(self, text: list[int], hidden: Sequence[Tensor], number: int, params: SamplingParams) -> list[int]:
        number, masks = min(number, PARALLEL), min(number, PARALLEL) - 1
        masked = self._read(self.weights["mask_hidden"].flatten().view(3, 1, SIZE), every=True).expand(masks, -1)
        out = self._eagle3_layer([*text[1:], *[MASK] * masks], torch.cat([self._read(hidden), masked]))[-number:]
        return [self._pick(self._eagle3_logits(one), params, len(text) + place) for place, one in enumerate(out)]

    def _read(self, hidden: Sequence[Tensor], *, every: bool = False) -> Tensor:
        """What EAGLE-3 makes of the hidden states that it reads, or of ``every`` one of them."""
        w, n = self.weights, len(hidden) - 1
        reads = range(3) if every else self.made.reads or (2, n // 2, n - 3)
        read = torch.cat([hidden[layer] for layer in reads], -1)
        return F.linear(norm(read, w["input_norm.weight"]) if "input_norm.weight" in w else read, w["fc.weight"])

    def _eagle3_layer(self, tokens: Sequence[int], states: Tensor) -> Tensor:
        w = self.weights
        embedding = w.get("embed_tokens.weight", self.verifier.get_input_embeddings().weight)
        normed = norm(states, w["layers.0.hidden_norm.weight"])
        x = torch.cat([norm(embedding[list(tokens)], w["layers.0.input_layernorm.weight"]), normed], -1)
        return self._over(x, normed if self.made.config.get("norm_before_residual") else states)

    def _eagle3_logits(self, out: Tensor) -> Tensor:
        w, logits = self.weights, torch.full((VOCAB,), -torch.inf)
        logits[w["d2t"] + torch.arange(KNOWN)] = w["lm_head.weight"] @ norm(out, w["norm.weight"])
        return logits

    def _mtp(self, text: list[int], hidden: Sequence[Tensor], number: int, params: SamplingParams) -> list[int]:
        assert self.made.out is not None
        states, lm_head = hidden[-1], self.verifier.get_output_embeddings()
        for _ in range(number):
            out = self.made.out(self.verifier, text, states)[-1:]
            text.append(self._pick(lm_head(out)[0], params, len(text)))
            states = torch.cat([states, out])
        return text[-number:]

    def _over(self, x: Tensor, residual: Tensor) -> Tensor:
        """A Llama layer over a whole text."""
        w = {name.removeprefix("layers.0."): tensor for name, tensor in self.weights.items()}
        return over(x, residual, w, torch.ones(len(x), len(x)).tril() > 0)
