"""Networks of Transformers on any device, unchanged: from packed rows to logits, with our own attention function.

A network is probed with packed rows when it is loaded. It is refused if its layers attend in another way than they declare, or
if its logits differ from those of Transformers' own forward pass.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn

from cascade.cpu.cache import Packed
from cascade.cpu.linear import Linear
from cascade.engine import devices, draft_vocab
from cascade.engine.layers import cut_config
from cascade.engine.memory import host_memory
from cascade.engine.model_config import unlike_attention
from cascade.engine.network.attention import ATTENTION, Attention, Contiguous, Native, Survey
from cascade.engine.network.llama import is_written_out
from cascade.errors import ModelError, reason
from cascade.params import SamplingParams
from cascade.scorer import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # takes seconds

Module = TypeVar("Module", bound=nn.Module)

# the error allowed when a model is loaded, relative to the size of logits; `COARSE` for other dtypes, such as bfloat16
TOLERANCE, COARSE = {torch.float32: 1e-3, torch.float16: 0.03}, 0.15
CONV1D = "Conv1D"  # Transformers' linear layer with transposed weights
LANES = 16  # numbers that a vectorised operation of PyTorch processes at once
FREE_FACTOR = 2  # free memory needed, in multiples of the weights: for copies of them, and as much for keys and values


class Published:
    """A network of Transformers, with our attention and, on a CPU, our products of linear layers."""

    def __init__(
        self, module: "PreTrainedModel", draft_ids: Tensor | None = None, *, attention: Attention | None = None
    ) -> None:
        """Raises `ModelError` if it cannot run packed passes.

        ``draft_ids`` ``[n]`` int64 are the only tokens that it predicts; by default all. ``attention`` is by default the
        device's: our own kernel on a CPU, PyTorch's on others.
        """
        self.module: Any = module.eval()
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        devices.add_exactly(self.device)
        self.draft_ids = draft_ids
        try:
            self._prepare(attention or (Native if self.device.type == "cpu" else Contiguous))
        except ModelError as error:
            raise ModelError(f"{type(module).__name__} cannot be served: {error}") from error.__cause__

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: [*part.shape] for name, part in self.module.state_dict().items()}

    @property
    def num_parameters(self) -> int:
        return int(self.module.num_parameters())

    @property
    def weights_read(self) -> tuple[int, int, int]:
        """The number of layers, and how many weights a pass reads on average of each layer and of the output embedding."""
        layers, head = stack(self.module), self.module.get_output_embeddings()
        count = sum(part.numel() for part in layers.parameters())
        return len(layers), count // len(layers), sum(part.numel() for part in head.parameters())

    def new_cache(self) -> Any:
        """Keys and values of a new session: a `cascade.scorer.Store`."""
        return self._attention.new_cache()

    def logits(self, packed: Packed) -> Tensor:
        """Logits ``[len(packed.keep), vocab_size]``."""
        # one copy to the device for all three tensors
        sent, n = devices.sent(packed.tokens + packed.positions + packed.keep, self.device), len(packed.tokens)
        inputs = {"input_ids": sent[None, :n], "position_ids": sent[None, n : 2 * n]}
        keep, plan = sent[2 * n :], self._attention.plan(packed.spans)
        head = self.module.get_output_embeddings()
        with head.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, keep], *inputs[1:])):
            out: Tensor = self.module(**inputs, use_cache=False, cascade_pass=plan).logits[0]
        if self.draft_ids is None:
            return out
        ids = self.draft_ids.to(self.device)
        return draft_vocab.spread(out[:, ids], ids, self.vocab_size)

    # other networks with its weights

    def cut(self, layers: Sequence[int]) -> Self:
        """A network of ``layers`` of this one, with the same weights; raises `ModelError` if a layer does not exist."""
        other = copy.copy(self)
        other.module = module = _copied(self.module)
        every = stack(module)
        cut_config(module.config, layers)
        kept = [every[layer] for layer in layers]
        del every[:]
        every.extend(kept)
        for place, layer in enumerate(kept):
            for part in layer.modules():
                if hasattr(part, "layer_idx"):
                    part.layer_idx = place  # type: ignore[assignment]  # no module
        other._survey = self._survey.cut(layers)
        other._attention = type(self._attention)(other._survey, self.dtype)
        return other

    @torch.no_grad()
    def renewed(self, weights: Mapping[str, Any], rest: Callable[[], object]) -> Self:
        """The same network with other weights of the same shapes; ``rest`` is called after each.

        It is not loaded by Transformers, which would change PyTorch's default dtype meanwhile, also for a running pass.
        """
        other = copy.copy(self)
        other.module = module = _copied(self.module)
        for part in module.modules():
            vars(part).pop("forward", None)  # our kernels' forward, which uses the old weights
        held = {}
        for name, part in weights.items():
            held[name] = part[...].to(self.device, self.dtype)
            rest()
        module.load_state_dict(held, strict=False, assign=True)
        module.tie_weights()
        multiply_row_by_row(module.eval())
        return other

    # the probe at load

    @torch.inference_mode()
    def _prepare(self, attention: Attention) -> None:
        """Choose the attention; raises `ModelError` if a layer attends in another way, or if logits are not the network's."""
        module = self.module
        if problem := unlike_attention(module.config):
            raise ModelError(problem)
        texts = probe_texts(module.get_input_embeddings().weight.shape[0])
        # every network has "eager", but it adds scores in the network's dtype, too coarse for keys as large as Qwen2.5's;
        # "sdpa" omits softcapping, before Transformers 5.20 silently
        capped = getattr(module.config.get_text_config(), "attn_logit_softcapping", None) is not None
        module.set_attn_implementation("sdpa" if module._supports_sdpa and not capped else "eager")
        expected = module(input_ids=torch.tensor(texts, device=self.device), use_cache=False).logits
        if not expected.isfinite().all():
            raise ModelError("its logits are not finite numbers")
        self.vocab_size = int(expected.shape[-1])  # rows of the output embedding, padding included
        draft_ids, self.draft_ids = self.draft_ids, None
        try:
            self._survey = Survey.of(module)
            self._attention = attention(self._survey, self.dtype)
            module.set_attn_implementation(ATTENTION)
            multiply_row_by_row(module)
            logits = self._replay(texts)
            self.same_bits = attention is Native and keeps_bits(module, self.dtype)  # as far as can be judged without passes
        except (RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
            raise ModelError(f"it does not take packed rows ({reason(error)})") from error
        if not agree(module, logits, expected):
            raise ModelError("its logits change when rows are packed into one input")
        self.draft_ids = draft_ids

    def _replay(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits ``[texts, n, vocab_size]`` of the last positions, after wrong drafts were rolled back."""
        starts, params, caches = [4, 5], SamplingParams(), [self.new_cache() for _ in texts]
        parts = list(zip(caches, starts, texts, strict=True))
        self.logits(Packed.of([Row(cache, 0, [*text[:start], *reversed(text)], 1, params) for cache, start, text in parts]))
        rows = [Row(cache, start, text[start:], 5, params) for cache, start, text in parts]
        return self.logits(Packed.of(rows)).view(len(texts), 5, -1)


def stack(module: Any) -> nn.ModuleList:
    """The list of a network's layers; raises `ModelError` if there is not exactly one."""
    total = module.config.get_text_config().num_hidden_layers
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == total:
            return part
    raise ModelError(f"{type(module).__name__} has no list of its {total} layers, of which some could be left out")


def _copied(module: Module) -> Module:
    """A copy of a network that shares its weights and kernels."""
    kernels = [kernel for part in module.modules() if (kernel := vars(part).get("forward")) is not None]
    memo: dict[int, Any] = {id(part): part for part in (*module.parameters(), *module.buffers(), *kernels)}
    return copy.deepcopy(module, memo)


def probe_texts(vocab_size: int) -> list[list[int]]:
    """Two texts of 10 tokens, scored at load to check packed passes against the network's own."""
    return [[(7919 * place + 104729 * text + 1) % vocab_size for place in range(10)] for text in (1, 2)]


def agree(network: Any, logits: Tensor, expected: Tensor) -> bool:
    """Whether logits ``[texts, n, vocab_size]`` are those expected of the last ``n`` positions, at most positions of each text.

    Not all positions must agree: where rounding makes a mixture choose another expert, two runs of the model itself differ.
    """
    in_4_bits = getattr(network, "is_loaded_in_4bit", False)  # its products are in bfloat16, whatever the network's dtype
    tolerance = COARSE if in_4_bits else TOLERANCE.get(network.dtype, COARSE)
    logits, expected = logits.float(), expected[:, -logits.shape[1] :].float()
    size = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-9)
    errors = (logits - expected).norm(dim=-1) / size
    return bool((errors.median(dim=-1).values <= tolerance).all())  # false for NaN


# products of linear layers on a CPU


@torch.no_grad()
def multiply_row_by_row(module: nn.Module) -> None:
    """Run its linear layers, in float32 or bfloat16 on a CPU, on copies of their weights in the layout of our kernels.

    With PyTorch's products the bits of a row depend on the number of rows, so a text would depend on its passes' other rows.
    """
    plain: list[Any] = [layer for layer in module.modules() if _is_plain(layer)]
    if host_memory() < FREE_FACTOR * sum(layer.weight.nbytes for layer in plain):
        return
    for layer in plain:
        layer.forward = Linear(layer.weight if isinstance(layer, nn.Linear) else layer.weight.t(), layer.bias)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is a plain linear layer: not quantised, adapted or changed."""
    if not (type(layer) is nn.Linear or type(layer).__name__ == CONV1D) or "forward" in vars(layer):
        return False
    weight = layer.weight.data
    return type(weight) is Tensor and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


def keeps_bits(network: Any, dtype: torch.dtype) -> bool:
    """Whether a row's logits probably have the same bits in every pass on a CPU, judged without weights.

    Experts (a weight tensor of three dimensions) get a varying number of rows from their router. PyTorch's vectorised
    operations process `LANES` numbers at once over all rows, and round the remaining ones differently; with other widths than
    multiples of `LANES` these lie in different rows.
    """
    if dtype is torch.float16 or any(weight.dim() > 2 for weight in network.parameters()):
        return False
    head = network.get_output_embeddings()
    layers = [layer for layer in network.modules() if layer is not head]
    widths = [layer.out_features for layer in layers if isinstance(layer, nn.Linear)]
    widths += [layer.nf for layer in layers if type(layer).__name__ == CONV1D]
    return is_written_out(network) or all(width % LANES == 0 for width in widths)
