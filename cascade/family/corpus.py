"""The training text: Python source files of the standard library that comes with the running interpreter.

The standard library is distributed under the PSF License Agreement (https://docs.python.org/3/license.html).
A file is *held out* by a hash of its path, so the split does not depend on the machine, and tokenizer and models
never see a held-out file.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Split = Literal["train", "held_out"]

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
# Base models know no roles: contents follow each other with a blank line in between, and the model goes on behind the last one.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- "" if loop.first else "\\n\\n" }}{{ message.content }}
{%- for call in message.tool_calls %}{{ "\\n" if message.content or not loop.first }}{{ call.function | tojson }}{% endfor %}
{%- endfor %}"""
# Folders of generated tables, which would teach the tokenizer hexadecimal numbers, and of what is no standard library.
EXCLUDED = ("encodings", "pydoc_data", "site-packages", "__pycache__")
HELD_OUT_SHARE = 1 / 20


def source_files(split: Split, root: Path | None = None) -> list[Path]:
    """Source files of one split in a fixed order; ``root`` is the interpreter's standard library if not given."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not set(EXCLUDED) & set(p.relative_to(root).parts))
    return [p for p in files if is_held_out(p.relative_to(root)) == (split == "held_out")]


def is_held_out(path: Path) -> bool:
    """Whether a file, named relative to the standard library, belongs to the held-out split."""
    digest = hashlib.blake2b(path.as_posix().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def documents(files: list[Path]) -> Iterator[str]:
    """The text of each file that is valid UTF-8 and not empty."""
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield text


def train_tokenizer(files: list[Path]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of ``VOCAB_SIZE`` tokens, every byte representable, one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(files), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, files: list[Path]) -> npt.NDArray[np.uint16]:
    """All documents as one stream ``[num_tokens]`` of ids, each followed by the end-of-text token."""
    ids: list[int] = []
    for text in documents(files):
        ids += tokenizer(text, verbose=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
    return np.asarray(ids, dtype=np.uint16)


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for single bytes in the vocabulary."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())
