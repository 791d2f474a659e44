"""Converts GGUF files to folders that Transformers reads, once, and keeps them in a cache.

A file becomes two folders, each made when it is first needed: ``text`` has the configuration and the tokenizer, ``model`` also
has the weights. Their path below `cascade.engine.kept.cache_folder` depends on the path, the size and the time of the file.

Weights are kept in the narrowest dtype that holds each of them exactly. For quantised files that is float32, since their
numbers are products with a 16-bit scale. bfloat16 would halve the memory, but round the weights and so change the text: set
``dtype``.
"""

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cascade.engine.kept import CACHE, cache_folder, kept
from cascade.engine.memory import GIB, host_memory
from cascade.errors import ModelError, model_errors, reason

MAGIC = b"GGUF"
SUFFIX = ".gguf"
FORM = 2  # version of the folders' format
TEXT, MODEL = "text", "model"
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # keys of ending tokens under tokenizer.ggml
STATED = {  # keys of an architecture that Transformers may leave out, and its own fields
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# values of tokenizer.ggml.pre: texts are cut as for GPT-2, or so after each digit was cut off
AS_GPT2 = ("gpt-2", "phi-2", "a.x-4.0", "exaone4", "gigachat", "granite-docling", "jais", "mellum", "mpt", "olmo", "trillion")
SINGLE_DIGITS = ("codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "smollm", "starcoder")
NARROW = {"BF16": "bfloat16", "F16": "float16"}  # dtypes by the 16-bit kinds of tensors

log = logging.getLogger(__name__)


def is_gguf(source: str) -> bool:
    """Whether ``source`` is the path of a GGUF file; raises `ModelError` if it only has the name of one."""
    path = Path(source)
    if not path.is_file():
        if source.endswith(SUFFIX) and not path.exists():
            raise ModelError(f"There is no file {source!r}: give the path of a GGUF file")
        return False
    with path.open("rb") as file:
        begins = file.read(len(MAGIC)) == MAGIC
    if not begins and source.endswith(SUFFIX):
        raise ModelError(f"{source!r} is no GGUF file: it does not begin with {MAGIC.decode()!r}; download it again")
    return begins


def described(source: str) -> str:
    """A folder with the configuration and the tokenizer of a GGUF file; any other source is returned unchanged.

    Raises `ModelError` if the file is damaged or Transformers cannot convert it.
    """
    if not is_gguf(source):
        return source
    place = _place(Path(source))
    whole = place / MODEL
    return str(whole if whole.is_dir() else kept(place / TEXT, partial(_describe, source), states=place.parent))


def converted(source: str, dtype: str | None = None) -> str:
    """A folder with the dequantised model of a GGUF file; any other source is returned unchanged.

    Weights are kept in ``dtype``, or in the narrowest that holds each of them exactly.
    Takes as much memory as the weights in float32. Raises `ModelError` if the file is damaged, Transformers cannot convert it,
    or memory or disk are too small.
    """
    if not is_gguf(source):
        return source
    place = _place(Path(source))
    kept(place / TEXT, partial(_describe, source), states=place.parent)
    folder = place / (f"{MODEL}-{dtype}" if dtype else MODEL)
    return str(kept(folder, partial(_convert, source, dtype=dtype), states=place.parent))


def _place(file: Path) -> Path:
    """Where the folders of a file in its present state are."""
    status = file.stat()
    path = file.resolve()
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    return cache_folder() / "gguf" / f"{path.stem}-{name}" / f"{FORM}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _read(source: str) -> Any:
    """The file's `gguf.GGUFReader`; raises `ModelError` if the file is damaged or cannot be converted."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        parts = int(_value(reader, "split.count", 1))
        architecture = str(_value(reader, "general.architecture", ""))
    except Exception as error:  # a damaged file may cause any error
        raise ModelError(f"The GGUF file {source!r} is damaged ({reason(error)}): download it again") from error
    if parts > 1:
        raise ModelError(f"The GGUF file {source!r} is one of {parts} parts: join them, with llama-gguf-split --merge")
    if not architecture or not reader.tensors:
        raise ModelError(f"The GGUF file {source!r} holds no model: give the file with the weights")
    return reader


def _value(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hide Transformers' progress bars, since a conversion is part of a start with its own progress."""
    from transformers import modeling_gguf_pytorch_utils as older  # has a progress bar that no public option hides
    from transformers.utils.logging import set_tqdm_hook

    hook = set_tqdm_hook(lambda bar, places, options: bar(*places, **{**options, "disable": True}))
    bar, older.tqdm = older.tqdm, partial(older.tqdm, disable=True)
    try:
        yield
    finally:
        set_tqdm_hook(hook)
        older.tqdm = bar


@_without_bars()
def _describe(source: str, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    reader, given = _read(source), _given(source)
    with _by_transformers(source, reader):
        config = AutoConfig.from_pretrained(**given)
        tokenizer = AutoTokenizer.from_pretrained(**given)
    if problem := _unread(reader, config) or _cut(reader, tokenizer):
        raise ModelError(f"{_refusal(source)}: {problem}, which Transformers does not read")
    config.dtype = _dtype(reader)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = {name: _value(reader, f"tokenizer.ggml.{name}") for name in (*END_KEYS, "bos_token_id", "padding_token_id")}
    ends = list(dict.fromkeys(int(ids[name]) for name in END_KEYS if ids[name] is not None))
    GenerationConfig(
        bos_token_id=ids["bos_token_id"],
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=ids["padding_token_id"],
    ).save_pretrained(folder)


@_without_bars()
def _convert(source: str, folder: Path, dtype: str | None) -> None:
    """Write the weights beside the results of `_describe`."""
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    shutil.copytree(folder.parent / TEXT, folder, dirs_exist_ok=True)
    reader, ends = _read(source), GenerationConfig.from_pretrained(folder)
    dtype = dtype or _dtype(reader)
    numbers = sum(int(tensor.n_elements) for tensor in reader.tensors)
    _check_room(source, folder, numbers, numbers * (4 if dtype == "float32" else 2))
    log.info("%s is dequantised once, to %s in %s", source, dtype, folder.parent)
    given: dict[str, Any] = {**_given(source), "quantization_config": GgufConfig(dequantize=True)}
    with _by_transformers(source, reader):
        network, report = AutoModelForCausalLM.from_pretrained(**given, dtype=dtype, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):  # Transformers has initialised them at random
        raise ModelError(f"The GGUF file {source!r} lacks {len(missing)} weights of its model, such as {missing[0]}")
    if (surplus := numbers - network.num_parameters()) > 0:
        raise ModelError(f"{_refusal(source)}: Transformers' model has no place for {surplus} of its numbers, such as biases")
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.hf_quantizer, network.is_quantized = None, False  # so that it can be saved
    network.generation_config = ends
    network.save_pretrained(folder)


def _given(source: str) -> dict[str, str]:
    path = Path(source)
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def _refusal(source: str) -> str:
    return f"The GGUF file {source!r} cannot be converted, take the model's safetensors checkpoint"


def _by_transformers(source: str, reader: Any) -> contextlib.AbstractContextManager[None]:
    architecture = _value(reader, "general.architecture")
    return model_errors(f"{_refusal(source)}: Transformers does not take its model of the architecture {architecture!r}")


def _unread(reader: Any, config: Any) -> str | None:
    """A property of the file that Transformers would ignore, so that the model would give another text."""
    for tensor in reader.tensors:
        if tensor.name.startswith("rope_"):  # frequencies in the file, as for Llama 3.1 and Phi 3
            return f"it scales positions by the tensor {tensor.name}"
    text, prefix = config.get_text_config(), _value(reader, "general.architecture")
    rope = getattr(text, "rope_parameters", None) or {}
    kind, factor = (_value(reader, f"{prefix}.rope.scaling.{name}") for name in ("type", "factor"))
    if kind not in (None, "none") and (rope.get("rope_type"), rope.get("factor")) != (kind, factor):
        return f"it scales positions by {prefix}.rope.scaling.type {kind!r}"
    parts = (text.to_dict(), rope, *(part for part in rope.values() if isinstance(part, dict)))  # some for a kind of layer
    for key, field in STATED.items():
        number = _value(reader, f"{prefix}.{key}")
        if number and number not in [part.get(field) for part in parts]:
            return f"its {prefix}.{key} is {number}"
    return None


def _cut(reader: Any, tokenizer: Any) -> str | None:
    """Cut single digits off where the file says so; returns what else Transformers ignores, so that tokens would be others."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    backend, pre, prefix = tokenizer.backend_tokenizer, "tokenizer.ggml.pre", "tokenizer.ggml.add_space_prefix"
    if isinstance(backend.pre_tokenizer, ByteLevel):  # which cuts as for GPT-2
        if (kind := _value(reader, pre)) in SINGLE_DIGITS:
            backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
        elif kind not in AS_GPT2:
            return f"its {pre} is {kind!r}"
    elif _value(reader, prefix) is False and tokenizer.tokenize("a")[0].startswith("▁"):
        return f"its {prefix} is False"
    return None


def _dtype(reader: Any) -> str:
    """The narrowest dtype that holds every number of the file exactly: 16 bits only if nothing is quantised."""
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    for kind, dtype in NARROW.items():
        if kind in kinds and kinds <= {kind, "F32"} and all(_survives(tensor, dtype) for tensor in reader.tensors):
            return dtype
    return "float32"


def _survives(tensor: Any, dtype: str) -> bool:
    import torch

    if tensor.tensor_type.name != "F32":
        return True
    numbers = torch.tensor(tensor.data)
    return torch.equal(numbers.to(getattr(torch, dtype)).float(), numbers)


def _check_room(source: str, folder: Path, numbers: int, size: int) -> None:
    memory, free = 4 * numbers, host_memory()
    if memory > free:
        raise ModelError(
            f"The GGUF file {source!r} takes {memory / GIB:.2f} GiB of memory to convert and {free / GIB:.2f} GiB are free: "
            "take a larger machine, or the model's safetensors checkpoint"
        )
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ModelError(
            f"The GGUF file {source!r} takes {size / GIB:.2f} GiB once it is converted and {str(cache_folder())!r} has "
            f"{free / GIB:.2f} GiB free: set {CACHE} to a folder with more"
        )
