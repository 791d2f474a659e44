"""Multi-token prediction: one more layer of a model's own kind, trained with it, that guesses a token further ahead.

Position i of its text is the token at i + 1 together with the model's last hidden state at i, after its final norm:

    x = proj(norm(embedding), norm(h)), in some models the other way round;  out = norm(layer(x));  logits = head(out)

After the text its own output, normed, takes the place of hidden states (DeepSeek-V3, arXiv 2412.19437, section 2.2, where
each guess has a layer; models are published with one, which guesses them all).

The tensors lie beside those of the model, which Transformers does not load, or in a file of their own:

| models | names of the first layer | concatenation |
|---|---|---|
| DeepSeek-V3, GLM-4.5, GLM-4.6 | ``model.layers.{layers of the model}.{enorm, hnorm, eh_proj, ...}`` | embedding, hidden |
| Qwen3-Next, Qwen3.5 | ``mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, layers.0}`` | embedding, hidden |
| MiMo | ``model.mtp_layers.0.{token_layernorm, hidden_layernorm, input_proj, final_layernorm, ...}`` | hidden, embedding |

The layer is made by the class of the model's own layers, as the last of them with the same tensors, so that it is dense or a
mixture as these say. Copies of the model's embeddings are not held twice.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from cascade.engine.checkpoint import INDEX, SINGLE, check_files
from cascade.engine.gguf import described
from cascade.engine.heads.chain import Chain
from cascade.engine.heads.checkpoint import SHARED, Checkpoint, file_shapes, model_errors
from cascade.engine.heads.head import Verifier
from cascade.engine.heads.reader import decoder
from cascade.engine.model_config import read_config
from cascade.engine.network.llama import between
from cascade.engine.network.survey import SURVEY, Survey
from cascade.engine.tokenizer import check_source, is_local
from cascade.errors import ModelError, reason

log = logging.getLogger(__name__)

FULL = "full_attention"
BLOCK = "block."
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
PROJECTION = "eh_proj.weight"  # which every layer has
SUFFIX = ".safetensors"


class Mtp(Chain):
    """A decoder layer of Transformers, after embeddings and hidden states."""

    kind = "mtp"

    def __init__(
        self,
        block: nn.Module,
        norm: Callable[[], nn.Module],
        rotary: nn.Module,
        verifier: Verifier,
        names: Collection[str] = (),
        *,
        hidden_first: bool = False,
    ) -> None:
        """``rotary`` gives the block its angles, and ``names`` are the embeddings that are not the verifier's.

        With ``hidden_first`` its projection takes the hidden state before the embedding.
        """
        super().__init__(verifier.vocab_size)
        size = verifier.hidden_size
        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = block
        self.reads, self.width = (verifier.num_layers,), size
        self.embed_with(verifier, names, size)
        self._hidden_first = hidden_first
        self._rotary = (rotary,)  # a tuple: its module stays the verifier's

    def number(self, first: int) -> None:
        for module in self.block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = first  # type: ignore[assignment]

    @torch.inference_mode()
    def survey(self, network: PreTrainedModel) -> None:
        """Note what its layer attends with; raises `ModelError` if it goes round the attention of Transformers."""
        found, like = Survey(), self.eh_proj.weight
        tokens = torch.zeros(2, dtype=torch.long, device=like.device)
        before = network.config._attn_implementation
        network.set_attn_implementation(SURVEY)
        try:
            self(tokens, like.new_zeros(2, self.width), torch.arange(2, device=like.device)[None], None, found)
        finally:
            network.set_attn_implementation(before)
        self.attends = tuple(found.heads.values())

    def state(self, hidden: Sequence[Tensor]) -> Tensor:
        return hidden[0]

    def logits(self, out: Tensor) -> Tensor:
        return self.project(out)

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, reader: Any, planned: Any) -> Tensor:
        """See `Chain.forward`; its layer attends by Transformers' own interface, which hands ``planned`` on."""
        parts = (self.enorm(self.embed(tokens)), self.hnorm(states))
        x = self.eh_proj(torch.cat(parts[::-1] if self._hidden_first else parts, dim=-1))[None]
        angles = self._rotary[0](x, positions)
        out = self.block(x, attention_mask=None, position_ids=positions, position_embeddings=angles, cascade_pass=planned)
        return self.norm((out[0] if isinstance(out, tuple) else out)[0])


# names


class Naming(NamedTuple):
    """How the tensors of the first layer are called."""

    prefix: str  # a pattern, for a model with {} layers of its own
    modules: Mapping[str, str]  # theirs after the prefix, and those of `Mtp`; all others are its block's
    hidden_first: bool = False

    def named(self, name: str, num_layers: int | str) -> str | None:
        """What a tensor is called in `Mtp`, None if it is not of this layer; ``num_layers`` may be a pattern."""
        prefix = re.match(self.prefix.format(num_layers), name)
        if prefix is None:
            return None
        rest = name[prefix.end() :]
        module = next((module for module in self.modules if rest.startswith(f"{module}.")), None)
        return f"{BLOCK}{rest}" if module is None else self.modules[module] + rest.removeprefix(module)


NAMINGS = (
    Naming(
        r"(model\.)?(language_model\.)?layers\.{}\.",
        {name: name for name in ("enorm", "hnorm", "eh_proj", "embed_tokens")}
        | {"shared_head.norm": "norm", "shared_head.head": "lm_head"},
    ),
    Naming(
        r"mtp\.(?!layers\.[1-9])",
        {name: name for name in ("embed_tokens", "norm", "lm_head")}
        | {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "layers.0": "block"},
    ),
    Naming(
        r"(model\.)?mtp_layers\.0\.",
        {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"},
        hidden_first=True,
    ),
)


def holds_mtp(names: Iterable[str], num_layers: int | str = r"\d+") -> bool:
    """Whether there are MTP layers among tensors, of a model with so many layers, or any number."""
    return any(naming.named(name, num_layers) == PROJECTION for name in names for naming in NAMINGS)


# files


def check_mtp(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> int | None:
    """How many numbers the first MTP layer in the checkpoint of a model has, before any weight is read; None if not known.

    Told from the names of tensors, sizes for checkpoints at hand; where the hub has one file without an index, that is not
    fetched to find out. Raises `ModelError` if there are no such layers.
    """
    text = read_config(source, revision=revision, trust_remote_code=trust_remote_code).get_text_config()
    num_layers, source = int(text.num_hidden_layers), described(source)
    with model_errors(f"The checkpoint {source!r} cannot be read"):
        if is_local(source):
            check_files(Path(source))
            files = Path(source).glob(f"*{SUFFIX}")
            sizes = {name: math.prod(shape) for file in files for name, shape in file_shapes(file).items()}
        elif not (sizes := dict.fromkeys(_weight_map(source, revision), 0)):
            return None
    if not holds_mtp(sizes, num_layers):
        raise _none(source, num_layers)
    return sum(size for name, size in sizes.items() if any(naming.named(name, num_layers) for naming in NAMINGS)) or None


def read_mtp(source: str, num_layers: int, *, revision: str | None = None) -> tuple[Checkpoint, Naming]:
    """The tensors of the first layer in a folder, file or hub id, as `Mtp` calls them.

    ``num_layers`` are the model's own. Raises `ModelError` if there are none, or none that can be read.
    """

    def wanted(name: str) -> bool:
        return any(naming.named(name, num_layers) for naming in NAMINGS)

    weights: dict[str, Tensor] = {}
    with model_errors(f"No MTP layers can be loaded from {source!r}"):
        for file in _files(source, revision, wanted):
            with safe_open(file, framework="pt") as opened:
                weights |= {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118
    for naming in NAMINGS:
        named = {new: tensor for name, tensor in weights.items() if (new := naming.named(name, num_layers))}
        if PROJECTION in named:
            checkpoint = Checkpoint(source, {}, named)
            for dtype in sorted({str(tensor.dtype) for tensor in named.values() if tensor.dtype.itemsize == 1}):
                kind = dtype.removeprefix("torch.")
                raise checkpoint.wrong(f"its MTP layers are quantised ({kind}): give those in 16 or 32 bits")
            return checkpoint, naming
    raise _none(source, num_layers)


def _none(source: str, num_layers: int) -> ModelError:
    return ModelError(
        f"The checkpoint {source!r} holds no MTP layers for a model of {num_layers} layers: choose another drafter than 'mtp'"
    )


def _weight_map(source: str, revision: str | None) -> dict[str, str]:
    """Files of the hub by the tensors in them; empty without an index."""
    index = Path(snapshot_download(source, revision=revision, allow_patterns=[INDEX])) / INDEX
    return json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}


def _files(source: str, revision: str | None, wanted: Callable[[str], bool]) -> Iterator[Path]:
    """Those that may hold what is wanted; of the hub no others are fetched."""
    if source.endswith(SUFFIX) and Path(source).is_file():
        yield Path(source)
        return
    check_source(source)
    if is_local(source):  # some files stand in no index
        check_files(Path(source))
        yield from sorted(Path(source).glob(f"*{SUFFIX}"))
        return
    weight_map = _weight_map(source, revision)
    names = sorted({file for name, file in weight_map.items() if wanted(name)}) if weight_map else [SINGLE]
    if names:
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=names))
        yield from (folder / name for name in names if (folder / name).is_file())


# from tensors to a head


def load_mtp(source: str, network: PreTrainedModel, *, revision: str | None = None) -> Mtp:
    """The first MTP layer of a folder, file or hub id, or of the checkpoint of ``network`` if ``source`` is "".

    In the dtype and on the device of ``network``; raises `ModelError` if there is none or if it does not fit.
    """
    text, own, name = network.config.get_text_config(), network.name_or_path, type(network).__name__
    if not source and not own:
        raise ModelError("The drafter 'mtp' cannot be used: its model was not loaded from a checkpoint, so give it a source")
    if not source and not is_local(own):
        revision = getattr(network.config, "_commit_hash", None)
    verifier, owner = Verifier.of(network), decoder(network)[0]
    checkpoint, naming = read_mtp(source or own, verifier.num_layers, revision=revision)
    norm, rotary = getattr(owner, "norm", None), getattr(owner, "rotary_emb", None)
    if norm is None or rotary is None:
        raise checkpoint.wrong(f"{name} has no rotary positions or final norm, and such a layer needs both")
    for copy in SHARED:
        if copy in checkpoint.weights and (size := checkpoint.size(copy)) != verifier.vocab_size:
            raise checkpoint.wrong(f"it was made for a vocabulary of {size} tokens, and the model has {verifier.vocab_size}")
    kind: Any = type(norm)
    try:
        with torch.device("meta"):
            block, checkpoint = _block(checkpoint, network)
            head = Mtp(
                block,
                lambda: kind(text.hidden_size, eps=text.rms_norm_eps),
                rotary,
                verifier,
                checkpoint.own_names(verifier),
                hidden_first=naming.hidden_first,
            )
        checkpoint.fill(head)
        _settle(head, network)
        head.survey(network)
    except ModelError:
        raise
    except Exception as error:  # of Transformers
        raise checkpoint.wrong(f"{name} has no layers that can be used so ({reason(error)})") from error
    if (number := getattr(text, "num_nextn_predict_layers", None) or 1) > 1:
        log.info("Of the %d MTP layers of %s the first one makes all guesses", number, checkpoint.source)
    if len(head.attends) != 1:
        raise checkpoint.wrong("its layer does not use the attention interface of Transformers")
    head.match_model(between(network))
    return head


def _block(checkpoint: Checkpoint, network: PreTrainedModel) -> tuple[nn.Module, Checkpoint]:
    """A layer like the last one of the model's that sees the whole text and has the same tensors, and these as it has them."""
    owner, layers = decoder(network)
    types = getattr(owner.config, "layer_types", None) or [FULL] * len(layers)
    given = {name: tensor for name, tensor in checkpoint.weights.items() if name.startswith(BLOCK)}
    rest = {name: tensor for name, tensor in checkpoint.weights.items() if name not in given}
    odd: list[str] = []  # tensors in which it differs from the layer that is most like it
    for number in (number for number in reversed(range(len(layers))) if types[number] == FULL):
        block = type(layers[number])(owner.config, number)
        wanted = {BLOCK + name for name in block.state_dict()}
        fitted = _fused(given, wanted)
        if fitted.keys() == wanted:
            return block, replace(checkpoint, weights=rest | fitted)
        odd = min([sorted(fitted.keys() ^ wanted), odd], key=lambda names: len(names) or math.inf)
    if not odd:
        raise checkpoint.wrong("the model has no layer with full attention")
    verb = "has" if odd[0] in given else "lacks"
    raise checkpoint.wrong(f"its layer {verb} the tensor {odd[0]}, unlike those of {type(network).__name__}")


def _fused(weights: Mapping[str, Tensor], wanted: Set[str]) -> dict[str, Tensor]:
    """With the experts of a layer in one tensor, where that is wanted: ``gate_up_proj`` and ``down_proj``."""
    matches = [match for name in weights if (match := EXPERT.match(name)) and f"{match[1]}.gate_up_proj" in wanted]
    fused = {name: tensor for name, tensor in weights.items() if name not in {match[0] for match in matches}}
    for base in sorted({match[1] for match in matches}):
        count = len({match[2] for match in matches if match[1] == base})
        gate, up, down = (
            torch.stack([weights[f"{base}.{number}.{part}_proj.weight"] for number in range(count)])
            for part in ("gate", "up", "down")
        )
        fused |= {f"{base}.gate_up_proj": torch.cat([gate, up], dim=1), f"{base}.down_proj": down}
    return fused


def _settle(head: Mtp, network: PreTrainedModel) -> None:
    """Move it to the device and dtype of the network, which keeps some parts in 32 bits."""
    exact = tuple(getattr(network, "_keep_in_fp32_modules_strict", None) or ())
    for name, tensor in (*head.named_parameters(), *head.named_buffers()):
        dtype = torch.float32 if any(part in name for part in exact) else network.dtype
        tensor.data = tensor.data.to(network.device, dtype if tensor.is_floating_point() else tensor.dtype)
    head.eval()
