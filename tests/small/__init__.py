"""Three small models and a head for tests: real text, and a pass of a millisecond.

They complete Python code: Llama architecture, 1.7 M, 5.4 M and 7.5 M parameters, a byte-level BPE tokenizer of 4,096 tokens,
1,024 tokens of context. Medium is a distilled piece of full, tiny one of medium. Data: the standard library of CPython 3.11.7
(PSF License Agreement, Copyright Python Software Foundation).

``weights`` holds matrices as `cascade.family.packed` does, compressed; `paths` unpacks them in bfloat16, once for all processes
of a machine.
"""

import functools
import hashlib
import lzma
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers import gguf_file
from cascade import Cascade
from cascade.settings.config import CascadeConfig

PACKED = Path(__file__).parent / "weights"
NAMES = ("tiny", "medium", "full")  # bottom to top
HEAD = "eagle3"
VOCAB = 4096
FORM = 1  # of what is unpacked


def paths() -> list[str]:
    """Folders of the models, bottom to top, as Transformers reads them."""
    return [str(_unpacked() / name) for name in NAMES]


def head() -> str:
    """Folder of a head that reads the full model, as EAGLE-3 heads are published."""
    return str(_unpacked() / HEAD)


def gguf(target: Path, kind: str = "Q4_1", source: Path | None = None, **options: Any) -> str:
    """The path of a GGUF file of a model, by default the tiny one, written as ``options`` say; see `gguf_file.write`."""
    gguf_file.write(source or Path(paths()[0]), target, kind, **options)
    return str(target)


def little(folder: Path) -> Path:
    """``folder``, with a random model in bfloat16 that has so few tokens that Transformers soon reads a GGUF file of it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from tests.architectures import build

    backend, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = level
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<|endoftext|>"], initial_alphabet=level.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["def read(path):\n    return path\n"], trainer)
    backend.save(str(folder / "tokenizer.json"))
    sizes = {"vocab_size": backend.get_vocab_size(), "intermediate_size": 64, "eos_token_id": 0}
    build("llama", **sizes).bfloat16().save_pretrained(folder)
    return folder


def cascade(**options: Any) -> Cascade:
    """The three in this process, in float32 on the CPU, for `Cascade.from_pretrained`."""
    return Cascade.from_pretrained(paths(), **{"dtype": "float32", "device": "cpu", **options})


def config() -> CascadeConfig:
    tiers = [
        {
            "name": name,
            "model_loading_config": {"model_id": f"small-{name}", "model_source": path},
            "engine_kwargs": {"dtype": "float32", "num_threads": 1},
            "deployment_config": {"ray_actor_options": {"num_cpus": 0.5}},
        }
        for name, path in zip(NAMES, paths(), strict=True)
    ]
    return CascadeConfig.parse({"tiers": tiers})


@functools.cache
def _unpacked() -> Path:
    files = sorted(path for path in PACKED.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join([bytes([FORM]), *(path.read_bytes() for path in files)])).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"cascade-small-{os.getuid()}-{digest}"
    if not folder.is_dir():
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
        for name in (*NAMES, HEAD):
            _unpack(PACKED / name, partial / name)
        try:
            partial.rename(folder)  # whole, or not at all
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    return folder


def _unpack(packed: Path, folder: Path) -> None:
    from safetensors.torch import load, save_file

    from cascade.family.packed import widened

    folder.mkdir()
    tokenizer = () if packed.name == HEAD else (PACKED / "tokenizer").iterdir()
    for file in (*packed.glob("*.json"), *tokenizer):
        shutil.copy(file, folder)
    weights = widened(load(lzma.decompress((packed / "model.safetensors.xz").read_bytes())))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
