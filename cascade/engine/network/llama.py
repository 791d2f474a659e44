"""Our own implementation of the Llama family for CPUs: from configuration, weights and packed rows to logits.

    x = embedding(tokens)
    for each layer:
        x = x + o(attention(rotary(qkv(norm(x)))))
        x = x + down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

In small passes, calling a kernel from Python takes longer than the kernel itself. So the kernels of a pass are one program, see
`cascade.cpu.program`, which is built once for each number of tokens. What else differs between passes, such as where keys and
values are, is written into it.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from cascade.cpu.attention import ATTENDING, OF_PASS, Heads, Kind, Sizes, Spans, attend_step, of_pass, scratch_of, store_step
from cascade.cpu.cache import BlockedCache, Packed, tables
from cascade.cpu.jit import Step
from cascade.cpu.layers import Rows, add_step, gate_step, norm_step, rotate_step
from cascade.cpu.linear import Linear
from cascade.cpu.program import Program
from cascade.cpu.tile import STEP
from cascade.engine import draft_vocab
from cascade.engine.layers import cut_config
from cascade.engine.model_config import FamilyConfig, is_of_family
from cascade.engine.weights import HEAD, shape_of

DTYPES = (torch.float32, torch.bfloat16)
KEPT = 512  # memory and programs are kept for passes of up to so many tokens: making a program takes some 5 ms
LEAST_KEPT = 32  # the tokens of the smallest memory that is kept; it doubles as passes grow
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
LAYER = "model.layers.{}."  # prefix of the names of a layer's weights
UNUSED = "rotary_emb.inv_freq"  # suffix of further tensors in old checkpoints


def is_written_out(network: Any) -> bool:
    """Whether `Llama` can replace Transformers' ``network``, judged by its class and configuration."""
    if network.device.type not in ("cpu", "meta") or network.dtype not in DTYPES:
        return False
    kind = network.config.model_type
    theirs = type(network).__module__ == f"transformers.models.{kind}.modeling_{kind}"
    whole = type(network).__name__.endswith("ForCausalLM") and not getattr(network, "_hf_peft_config_loaded", False)
    return theirs and whole and is_of_family(network.config.to_dict())


def weight_shapes(config: FamilyConfig) -> dict[str, list[int]]:
    """Shapes of all weights by their names in checkpoints, without an output embedding that is tied to the input embedding."""
    width, neurons, size = config.hidden_size, config.intermediate_size, config.head_size
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    biased = config.model_type in ("llama", "qwen3") and bool(getattr(config, "attention_bias", False))
    gated = config.model_type == "llama" and bool(getattr(config, "mlp_bias", False))
    matrices = {
        "self_attn.q_proj": ([queries, width], biased or config.model_type == "qwen2"),
        "self_attn.k_proj": ([keys, width], biased or config.model_type == "qwen2"),
        "self_attn.v_proj": ([keys, width], biased or config.model_type == "qwen2"),
        "self_attn.o_proj": ([width, queries], biased),
        "mlp.gate_proj": ([neurons, width], gated),
        "mlp.up_proj": ([neurons, width], gated),
        "mlp.down_proj": ([width, neurons], gated),
    }
    layer = {f"{name}.weight": shape for name, (shape, _) in matrices.items()}
    layer |= {f"{name}.bias": shape[:1] for name, (shape, has_bias) in matrices.items() if has_bias}
    layer |= {"input_layernorm.weight": [width], "post_attention_layernorm.weight": [width]}
    if config.model_type == "qwen3":
        layer |= {"self_attn.q_norm.weight": [size], "self_attn.k_norm.weight": [size]}
    shapes = {EMBEDDING: [config.vocab_size, width], NORM: [width]}
    if not config.tie_word_embeddings:
        shapes[HEAD] = shapes[EMBEDDING]
    for number in range(config.num_hidden_layers):
        shapes |= {LAYER.format(number) + name: shape for name, shape in layer.items()}
    return shapes


def holds_exactly(weights: Mapping[str, Any], config: FamilyConfig) -> bool:
    """Whether ``weights`` by name, tensors or slices of files, are exactly those of `weight_shapes`.

    A tied output embedding may also be there if it equals the input embedding.
    """
    given = {name: part for name, part in weights.items() if not name.endswith(UNUSED)}
    head = given.pop(HEAD, None) if config.tie_word_embeddings else None
    if {name: shape_of(part) for name, part in given.items()} != weight_shapes(config):
        return False
    return head is None or torch.equal(head[:], given[EMBEDDING][:])


class Weights:
    """Weights of a checkpoint by name, tensors or slices of files, each read when it is needed."""

    def __init__(self, parts: Mapping[str, Any], dtype: torch.dtype, epsilon: float, rest: Callable[[], object]) -> None:
        """The weights are kept in ``dtype``; ``rest`` is called after each matrix."""
        self._parts, self._dtype, self._epsilon, self._rest = parts, dtype, epsilon, rest

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def read(self, name: str) -> Tensor:
        weight: Tensor = self._parts[name][:]
        return weight.detach().to(self._dtype)

    def norm(self, name: str) -> "Norm":
        return Norm(self.read(name).float(), self._epsilon)

    def linear(self, *names: str) -> Linear:
        """Layers with a common input as one product, which costs less than several, in the layout of our kernels."""
        biases = [self.read(f"{name}.bias") for name in names if f"{name}.bias" in self]
        matrices = [self.read(f"{name}.weight") for name in names]
        made = Linear(torch.cat(matrices), torch.cat(biases) if biases else None)
        self._rest()
        return made


class Norm(NamedTuple):
    """``x / rms(x) * weight``."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a layer."""

    attention_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, number: int, weights: Weights) -> Self:
        begin = LAYER.format(number)
        turned = [f"{begin}self_attn.{name}_norm.weight" for name in "qk"]
        q_norm, k_norm = (weights.norm(name) if name in weights else None for name in turned)
        return cls(
            attention_norm=weights.norm(f"{begin}input_layernorm.weight"),
            qkv=weights.linear(*(f"{begin}self_attn.{name}_proj" for name in "qkv")),
            q_norm=q_norm,
            k_norm=k_norm,
            o=weights.linear(f"{begin}self_attn.o_proj"),
            mlp_norm=weights.norm(f"{begin}post_attention_layernorm.weight"),
            gate_up=weights.linear(f"{begin}mlp.gate_proj", f"{begin}mlp.up_proj"),
            down=weights.linear(f"{begin}mlp.down_proj"),
        )

    @property
    def numbers(self) -> int:
        return sum(part.numbers for part in (self.qkv, self.o, self.gate_up, self.down))


class Llama:
    """A model of the family, see `is_of_family`. A row's logits have the same bits in every pass."""

    device = torch.device("cpu")
    same_bits = True

    @torch.no_grad()
    def __init__(
        self,
        config: FamilyConfig,
        weights: Mapping[str, Any],
        dtype: torch.dtype,
        draft_ids: Tensor | None = None,
        rest: Callable[[], object] = lambda: None,
    ) -> None:
        """Take over ``weights`` by name, tensors or slices of files, see `weight_shapes`.

        ``draft_ids`` ``[n]`` int64 are the only tokens that it predicts; by default all. ``rest`` is called after each matrix.
        """
        self.dtype, self.draft_ids = dtype, draft_ids
        given = Weights(weights, dtype, config.rms_norm_eps, rest)
        self._embedding = given.read(EMBEDDING)
        layers = [Layer.of(number, given) for number in range(config.num_hidden_layers)]
        self._norm = given.norm(NORM)
        head = given.read(HEAD) if HEAD in given else self._embedding
        self._head = Linear(head if draft_ids is None else head[draft_ids])
        self._describe(config, layers)
        self._cos, self._sin = self._angles(1)

    def _describe(self, config: FamilyConfig, layers: Sequence[Layer]) -> None:
        self.config, self.layers = config, layers
        size = config.head_size
        self.sizes = Sizes(config.num_attention_heads, config.num_key_value_heads, size, size)
        self._shapes, self._windows = dict.fromkeys(range(len(layers)), self.sizes), config.windows
        self._workspace: Workspace | None = None

    @classmethod
    def of(cls, network: Any, draft_ids: Tensor | None = None) -> Self:
        """A model with the weights of Transformers' network, see `is_written_out`; does not change that."""
        return cls(FamilyConfig(network.config.to_dict()), network.state_dict(), network.dtype, draft_ids)

    def cut(self, layers: Sequence[int]) -> "Llama":
        """A model of ``layers`` of this one, with the same weights; raises `ModelError` if a layer does not exist."""
        other = copy.copy(self)
        other._describe(cut_config(copy.copy(self.config), layers), [self.layers[layer] for layer in layers])
        return other

    def renewed(self, weights: Mapping[str, Any], rest: Callable[[], object]) -> "Llama":
        """The same model with other weights of the same shapes; ``rest`` is called after each matrix."""
        return Llama(self.config, weights, self.dtype, self.draft_ids, rest)

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of its weights by name."""
        return weight_shapes(self.config)

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding, padding included."""
        return int(self.config.vocab_size)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def weights_read(self) -> tuple[int, int, int]:
        """The number of layers, and how many weights a pass reads of each layer and of the output embedding."""
        first = [math.prod(shape) for name, shape in self.shapes.items() if name.startswith(LAYER.format(0))]
        return len(self.layers), sum(first), self._head.in_features * self._head.out_features

    # passes

    def new_cache(self) -> BlockedCache:
        """Keys and values of a new session."""
        return BlockedCache(self._shapes, self.dtype)

    def logits(self, packed: Packed) -> Tensor:
        """Logits ``[len(packed.keep), vocab_size]``, float32."""
        ids, positions, keep = (torch.tensor(part, dtype=torch.int64) for part in packed[:3])
        tokens, workspace = len(ids), self._workspace_for(len(ids))
        spans = [*tables(packed.spans, self._shapes).values()]
        workspace.hidden[:tokens] = self._embedding.index_select(0, ids)
        if spans[0].longest > len(self._cos):
            self._cos, self._sin = self._angles(2 * spans[0].longest)
        torch.index_select(self._cos, 0, positions, out=workspace.cos[:tokens])
        torch.index_select(self._sin, 0, positions, out=workspace.sin[:tokens])
        key = (tokens, torch.get_num_threads())
        if key not in workspace.programs:
            program = Program(list(self._steps(tokens, workspace, spans)), tokens * sum(layer.numbers for layer in self.layers))
            workspace.programs[key] = program, program.places(ATTENDING, OF_PASS)
        program, places = workspace.programs[key]
        size = scratch_of(spans[0], self.sizes)
        scratch = torch.empty(torch.get_num_threads() * size)
        numbers = [of_pass(span, window, scratch.data_ptr(), size) for span, window in zip(spans, self._windows, strict=True)]
        program.put(places, np.repeat(np.array(numbers), len(places) // len(numbers), axis=0))
        program.run()
        logits: Tensor = self._head(workspace.hidden.index_select(0, keep))
        return logits if self.draft_ids is None else draft_vocab.spread(logits, self.draft_ids, self.vocab_size)

    def _steps(self, tokens: int, workspace: "Workspace", spans: Sequence[Spans]) -> Iterator[Step]:
        """The steps of a pass, from the embeddings of its tokens to their last hidden states."""
        x, r = Rows.of(workspace.hidden), workspace.scratch
        shape = (tokens, x.stride)
        heads, kv_heads, size, _ = self.sizes
        queries, turned = heads * size, (heads + kv_heads) * size
        q, k, v = r.qkv, r.qkv.behind(queries), r.qkv.behind(turned)
        given = [Heads(part.address, size, part.stride) for part in (q, k, v)]
        for layer, span, window in zip(self.layers, spans, self._windows, strict=True):
            yield norm_step(x, r.normed, shape, *layer.attention_norm)
            yield from layer.qkv.steps(r.normed, r.rounded, tokens, r.qkv)
            if layer.q_norm is not None and layer.k_norm is not None:
                yield norm_step(q, q, (tokens, queries), *layer.q_norm)
                yield norm_step(k, k, (tokens, turned - queries), *layer.k_norm)
            yield rotate_step(q, (tokens, turned), size, workspace.cos, workspace.sin)
            attend = attend_step(given, r.attended.address, 0, span, self.sizes, Kind(size**-0.5, window))
            yield store_step(attend)
            yield attend
            yield from layer.o.steps(r.attended, r.rounded, tokens, r.projected)
            yield add_step(x.address, r.projected, r.residual.address, shape)

            yield norm_step(r.residual, r.normed, shape, *layer.mlp_norm)
            yield from layer.gate_up.steps(r.normed, r.rounded, tokens, r.gate_up)
            yield gate_step(r.gate_up, r.gated.address, (tokens, r.gated.stride))
            yield from layer.down.steps(r.gated, r.rounded, tokens, r.down)
            yield add_step(r.residual.address, r.down, x.address, shape)
        yield norm_step(x, x, shape, *self._norm)

    def _workspace_for(self, tokens: int) -> "Workspace":
        """Memory for a pass of so many tokens; that of passes with at most `KEPT` is kept."""
        workspace = self._workspace
        if workspace is None or tokens > workspace.most:
            workspace = Workspace(self, max(LEAST_KEPT, 1 << (tokens - 1).bit_length()) if tokens <= KEPT else tokens)
            self._workspace = workspace if tokens <= KEPT else self._workspace
        return workspace

    def _angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first ``positions``, ``[positions, head_dim]``."""
        frequencies, amplitude = self.config.rotation
        angles = torch.arange(positions)[:, None].float() * frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos() * amplitude, angles.sin() * amplitude


class Scratch(NamedTuple):
    """Buffers for one layer, ``[most, ...]`` each, which the next layer overwrites."""

    normed: Rows
    rounded: Rows  # a product's rows in bfloat16, see `Linear.steps`
    qkv: Rows
    attended: Rows
    projected: Rows  # the projected rows of attention
    residual: Rows  # the sum after attention
    gate_up: Rows
    gated: Rows
    down: Rows


class Workspace:
    """Memory for passes of at most ``most`` tokens, and their programs."""

    def __init__(self, network: Llama, most: int) -> None:
        self.most = most
        self.programs: dict[tuple[int, int], tuple[Program, Any]] = {}  # and what changes in them
        layer = network.layers[0]
        size, half = len(layer.attention_norm.weight), layer.gate_up.out_features // 2
        attended = network.sizes.heads * network.sizes.value_size
        rounded = (max(size, half, attended) + STEP) // 2  # two to a float32, filled up to whole steps
        widths = (size, rounded, layer.qkv.width, attended, layer.o.width, size, layer.gate_up.width, half, layer.down.width)
        self._memory = [torch.zeros(most, width) for width in widths]
        self.scratch = Scratch(*map(Rows.of, self._memory))
        self.cos, self.sin = torch.zeros(2, most, network.sizes.key_size)
        self.hidden = torch.zeros(most, size)  # the sum that all layers add to
