"""The Llama family written out for CPUs: packed rows in, logits out, by our own kernels.

    x = embedding(tokens)
    for each layer:
        x = x + o(attention(rotary(qkv(norm(x)))))
        x = x + down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

Calling a kernel from Python takes longer than a kernel of a small pass runs. So the kernels of a pass are one program, see
`cascade.cpu.program`. It is written once for each number of tokens; what else differs from pass to pass, such as where keys and
values are, is put into it.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from cascade.cpu.attention import ATTENDING, OF_PASS, Heads, Kind, Sizes, attend_step, of_pass, scratch_of, store_step
from cascade.cpu.jit import Step
from cascade.cpu.layers import Rows, add_step, gate_step, norm_step, rotate_step
from cascade.cpu.linear import Linear
from cascade.cpu.program import Program
from cascade.cpu.tile import STEP
from cascade.engine.draft_vocab import DraftHead
from cascade.engine.model_config import is_of_family
from cascade.engine.network.attention import NativePass
from cascade.engine.network.plain import Plain

DTYPES = (torch.float32, torch.bfloat16)
KEPT = 32  # tokens of a pass whose memory and programs are kept: with drafts


def is_written_out(network: Any) -> bool:
    """Whether `Llama` runs it, told by its class and its configuration: in float32 and bfloat16 on a CPU."""
    if network.device.type not in ("cpu", "meta") or network.dtype not in DTYPES:
        return False
    if isinstance(network, Plain):
        return True
    kind = network.config.model_type
    theirs = type(network).__module__ == f"transformers.models.{kind}.modeling_{kind}"
    whole = type(network).__name__.endswith("ForCausalLM") and not getattr(network, "_hf_peft_config_loaded", False)
    return theirs and whole and is_of_family(network.config.to_dict())


class Norm(NamedTuple):
    """``x / rms(x) * weight``."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Self:
        return cls(module.weight.detach().float(), module.variance_epsilon)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights and sizes of a layer."""

    number: int
    attention_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    sizes: Sizes
    scaling: float

    @classmethod
    def of(cls, number: int, module: Any, rest: Callable[[], object]) -> Self:
        """Of Transformers' layer, whose matrices are put into the order of our kernels; ``rest`` is called after each."""
        attention, mlp = module.self_attn, module.mlp
        size = attention.head_dim
        heads, kv_heads = (part.out_features // size for part in (attention.q_proj, attention.k_proj))
        q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        return cls(
            number=number,
            attention_norm=Norm.of(module.input_layernorm),
            qkv=_side_by_side(rest, attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=None if q_norm is None else Norm.of(q_norm),
            k_norm=None if k_norm is None else Norm.of(k_norm),
            o=_side_by_side(rest, attention.o_proj),
            mlp_norm=Norm.of(module.post_attention_layernorm),
            gate_up=_side_by_side(rest, mlp.gate_proj, mlp.up_proj),
            down=_side_by_side(rest, mlp.down_proj),
            sizes=Sizes(heads, kv_heads, size, size),
            scaling=attention.scaling,
        )

    @property
    def numbers(self) -> int:
        return sum(part.numbers for part in (self.qkv, self.o, self.gate_up, self.down))


def _side_by_side(rest: Callable[[], object], *layers: nn.Linear) -> Linear:
    """Layers with one input as one: it has less to begin and to end than several."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    made = Linear(torch.cat([layer.weight.detach() for layer in layers]), torch.cat(biases) if biases else None)
    rest()
    return made


class Llama:
    """A network of the family, see `is_written_out`, on its own weights in the order of our kernels."""

    @torch.no_grad()
    def __init__(self, network: Any, *, owned: bool = False, rest: Callable[[], object] = lambda: None) -> None:
        """With ``owned`` the layers of ``network``, which nothing else uses, lose their weights one after the other.

        ``rest`` is called after each matrix.
        """
        backbone = network.model
        self._embedding: Tensor = backbone.embed_tokens.weight
        self.layers: list[Layer] = []
        for number, module in enumerate(backbone.layers[: network.config.num_hidden_layers]):
            self.layers.append(Layer.of(number, module, rest))
            if owned:
                module.to("meta")
        self._norm = Norm.of(backbone.norm)
        self._rotary = backbone.rotary_emb
        self._cos, self._sin = self._angles(1)
        self.angles = self._cos.shape[1]  # the number of angles of a position
        self._head = network.lm_head  # a drafter beside it shares it
        linear: Any = self._head.linear if isinstance(self._head, DraftHead) else self._head
        linear.forward = Linear(linear.weight)
        if owned and linear.weight is not self._embedding:
            linear.to("meta")
        self._workspace: Workspace | None = None

    def cut(self, layers: Sequence[int]) -> "Llama":
        """One of ``layers`` of this one, on the same weights."""
        other = copy.copy(self)
        other.layers = [replace(self.layers[layer], number=place) for place, layer in enumerate(layers)]
        other._workspace = None
        return other

    def __call__(self, ids: Tensor, positions: Tensor, keep: Tensor, planned: NativePass) -> Tensor:
        """Logits ``[kept, vocab_size]`` of those tokens at ``keep`` of ``[tokens]``."""
        tokens, workspace = len(ids), self._workspace_for(len(ids))
        spans = [planned.spans[layer.number] for layer in self.layers]
        workspace.hidden[:tokens] = self._embedding.index_select(0, ids)
        if spans[0].longest > len(self._cos):
            self._cos, self._sin = self._angles(2 * spans[0].longest)
        torch.index_select(self._cos, 0, positions, out=workspace.cos[:tokens])
        torch.index_select(self._sin, 0, positions, out=workspace.sin[:tokens])
        key = (tokens, torch.get_num_threads())
        if key not in workspace.programs:
            program = Program(
                list(self._steps(tokens, workspace, planned)), tokens * sum(layer.numbers for layer in self.layers)
            )
            workspace.programs[key] = program, program.places(ATTENDING, OF_PASS)
        program, places = workspace.programs[key]
        size = max(scratch_of(span, layer.sizes) for span, layer in zip(spans, self.layers, strict=True))
        scratch = torch.empty(torch.get_num_threads() * size)
        numbers = [
            of_pass(span, planned.windows[layer.number], scratch.data_ptr(), size)
            for span, layer in zip(spans, self.layers, strict=True)
        ]
        program.put(places, np.repeat(np.array(numbers), len(places) // len(numbers), axis=0))
        program.run()
        logits: Tensor = self._head(workspace.hidden.index_select(0, keep))
        return logits

    def _steps(self, tokens: int, workspace: "Workspace", planned: NativePass) -> Iterator[Step]:
        """Of a pass, from the embeddings of its tokens to their last hidden states."""
        x, r = Rows.of(workspace.hidden), workspace.scratch
        shape = (tokens, x.stride)
        for layer in self.layers:
            heads, kv_heads, size, _ = layer.sizes
            queries, turned = heads * size, (heads + kv_heads) * size
            q, k, v = r.qkv, r.qkv.behind(queries), r.qkv.behind(turned)

            yield norm_step(x, r.normed, shape, *layer.attention_norm)
            yield from layer.qkv.steps(r.normed, r.ordered, tokens, r.qkv)
            if layer.q_norm is not None and layer.k_norm is not None:
                yield norm_step(q, q, (tokens, queries), *layer.q_norm)
                yield norm_step(k, k, (tokens, turned - queries), *layer.k_norm)
            yield rotate_step(q, (tokens, turned), size, workspace.cos, workspace.sin)
            given = [Heads(part.address, size, part.stride) for part in (q, k, v)]
            kind = Kind(layer.scaling, planned.windows[layer.number])
            attend = attend_step(given, r.attended.address, 0, planned.spans[layer.number], layer.sizes, kind)
            yield store_step(attend)
            yield attend
            yield from layer.o.steps(r.attended, r.ordered, tokens, r.projected)
            yield add_step(x.address, r.projected, r.residual.address, shape)

            yield norm_step(r.residual, r.normed, shape, *layer.mlp_norm)
            yield from layer.gate_up.steps(r.normed, r.ordered, tokens, r.gate_up)
            yield gate_step(r.gate_up, r.gated.address, (tokens, r.gated.stride))
            yield from layer.down.steps(r.gated, r.ordered, tokens, r.down)
            yield add_step(r.residual.address, r.down, x.address, shape)
        yield norm_step(x, x, shape, *self._norm)

    def _workspace_for(self, tokens: int) -> "Workspace":
        """Memory for as many tokens; that of small passes is kept."""
        workspace = self._workspace
        if workspace is None or tokens > workspace.most:
            workspace = Workspace(self, max(tokens, KEPT))
            self._workspace = workspace if workspace.most == KEPT else self._workspace
        return workspace

    def _angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first ``positions``, ``[positions, head_dim]``."""
        cos, sin = self._rotary(torch.empty(0), position_ids=torch.arange(positions)[None])
        return cos[0].contiguous(), sin[0].contiguous()


class Scratch(NamedTuple):
    """Where layers work, ``[most, ...]`` each. Nothing is kept from one layer to the next."""

    normed: Rows
    ordered: Rows  # a product's rows, in its order
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
        attended = layer.sizes.heads * layer.sizes.value_size
        ordered = max(size, half, attended) + STEP
        widths = (size, ordered, layer.qkv.width, attended, layer.o.width, size, layer.gate_up.width, half, layer.down.width)
        self._memory = [torch.zeros(most, width) for width in widths]
        self.scratch = Scratch(*map(Rows.of, self._memory))
        self.cos, self.sin = torch.zeros(2, most, network.angles)
        self.hidden = torch.zeros(most, size)  # the sum that all layers add to
