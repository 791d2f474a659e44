"""One batched pass over an unmodified Transformers model: rows of any sessions from any positions, packed into one input."""

import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from cascade.errors import ModelError
from cascade.kv import Cache, Pass, Span
from cascade.sampling import own_tokens
from cascade.scorer import Row

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROBE = (3, 1, 4, 1, 5)  # token ids scored at load, to see that the model takes the path
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.03}  # of probe logits, relative to their spread


class Model:
    """A causal language model that scores packed rows; see `cascade.scorer.Scorer`."""

    def __init__(self, network: PreTrainedModel) -> None:
        """Take over a loaded network; raises `ModelError` if it cannot take the path."""
        self._network = network.eval()
        self._config = network.config.get_text_config()
        self._keeps_logits = "logits_to_keep" in inspect.signature(network.forward).parameters
        _probe(self)

    @classmethod
    def from_pretrained(
        cls,
        source: str,
        *,
        dtype: str | None = None,
        device: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Load from a local path or the Hugging Face hub; raises `ModelError`.

        ``dtype`` is the checkpoint's and ``device`` the GPU if there is one, unless given.
        """
        if dtype is not None and dtype not in DTYPES:
            raise ModelError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            network = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=DTYPES[dtype] if dtype else "auto",
                revision=revision,
                trust_remote_code=trust_remote_code,
            ).to(device)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"No model can be loaded from {source!r} on {device}: {reason}") from error
        return cls(network)

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding, padding included."""
        return int(self._network.get_output_embeddings().weight.shape[0])

    @property
    def context_len(self) -> int:
        """Positions the model was made for."""
        return int(getattr(self._config, "max_position_embeddings", None) or 2**20)

    @property
    def device(self) -> torch.device:
        return self._network.device

    @property
    def dtype(self) -> torch.dtype:
        return self._network.dtype

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self._network.parameters())

    def new_cache(self) -> Cache:
        """Keys and values of a new session."""
        return Cache()

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> list[list[int]]:
        """Own tokens of each row, see `cascade.scorer.Scorer`; one host read."""
        wanted = [(row.params, row.start + len(row.tokens) - row.num_own + 1, row.num_own) for row in rows]
        own = iter(own_tokens(self.logits(rows), wanted).tolist())
        return [[next(own) for _ in range(row.num_own)] for row in rows]

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Logits ``[sum of num_own, vocab_size]`` of the rows' last positions, in the model's dtype."""
        tokens: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        spans: list[Span] = []
        for row in rows:
            begin, end = len(tokens), len(tokens) + len(row.tokens)
            spans.append(Span(row.cache, begin, end, row.start))
            tokens += row.tokens
            positions += range(row.start, row.start + len(row.tokens))
            keep += range(end - row.num_own, end)
        # one copy to the device for all three
        packed = torch.tensor(tokens + positions + keep).to(self.device, non_blocking=True)
        n = len(tokens)
        return self._forward(packed[None, :n], packed[None, n : 2 * n], packed[2 * n :], Pass(spans))

    def _forward(self, ids: Tensor, positions: Tensor, keep: Tensor, cascade_pass: Pass) -> Tensor:
        options: dict[str, Any] = {"logits_to_keep": keep} if self._keeps_logits else {}
        out = self._network(
            input_ids=ids, position_ids=positions, use_cache=False, cascade_pass=cascade_pass, **options
        ).logits[0]
        return out if self._keeps_logits else out[keep]


def _probe(model: Model) -> None:
    """Refuse a network whose layers do not all use our attention, or that then says something else than by itself."""
    network, config = model._network, model._config
    name = type(network).__name__
    if any(kind not in ("full_attention", "sliding_attention") for kind in getattr(config, "layer_types", None) or ()):
        raise ModelError(f"{name} cannot be served: it has layers that are neither full nor sliding attention")
    ids = torch.tensor([[token % model.vocab_size for token in PROBE]], device=model.device)
    with torch.inference_mode():
        expected = network(input_ids=ids, use_cache=False).logits[0].float()
        network.set_attn_implementation("cascade")
        positions = torch.arange(ids.shape[1], device=ids.device)
        cascade_pass = Pass([Span(model.new_cache(), 0, ids.shape[1], 0)])
        try:
            found = model._forward(ids, positions[None], positions, cascade_pass).float()
        except (RuntimeError, TypeError, AttributeError) as error:
            raise ModelError(f"{name} cannot be served: its attention does not take the packed pass ({error})") from error
    if len(cascade_pass.layers) != config.num_hidden_layers:
        raise ModelError(
            f"{name} cannot be served: {len(cascade_pass.layers)} of its {config.num_hidden_layers} layers use "
            "the attention interface of Transformers"
        )
    spread = (expected.amax() - expected.amin()).item()
    if (found - expected).abs().amax().item() > TOLERANCE.get(model.dtype, 0.15) * max(spread, 1e-6):
        raise ModelError(f"{name} cannot be served: its logits change when rows are packed into one input")


