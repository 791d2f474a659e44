"""Steps of training on one GPU: vLLM writes the text, and the drafters of the family learn from it."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.gpu.step import Notes
from cascade import family
from cascade.engine.loading import load_trainable
from cascade.engine.published_tokenizer import pretrained
from cascade.engine.vllm.model import VllmModel
from cascade.training.distillation import CAUSAL
from cascade.training.recipe import SPENT, Distillation, Plan
from cascade.training.text import SHARD_TOKENS, Shard, score
from cascade.training.writing import Turns, Written, end_tokens, own_prompts, write

ROWS, LONGEST = 512, 512  # texts at a time, and tokens of one
FILE_TOKENS = 4_000_000  # 8 MB
LEAST = 5_000_000  # tokens that are wanted


def text(notes: Notes) -> None:
    """vLLM writes conversations of the full model; they are kept as 16-bit token ids."""
    rows, longest, seconds, wanted = (8, 48, 20.0, 400) if notes.small else (ROWS, LONGEST, 25.0, 2 * LEAST)
    source = family.full()
    tokenizer = pretrained(source)
    turns = Turns.of(tokenizer, end_tokens(load_trainable(source, dtype="float32", device="cpu"), tokenizer))
    further: dict[str, Any] = {} if notes.small else {"max_num_batched_tokens": 16_384}  # so many begin in one pass
    options = notes.options(max_model_len=longest, **further)
    with closing(VllmModel(source, cache_tokens=rows * (longest + 64), options=options)) as model:  # and part of a block each
        begin, total, kept = time.perf_counter(), 0, list[Written]()
        files = 0
        for written in write(cast(Any, model), turns, own_prompts(turns), rows=rows, max_len=longest):
            kept.append(written)
            total += len(written.tokens)
            spent = time.perf_counter() - begin
            over = total >= wanted or spent > seconds
            if over or sum(len(text.tokens) for text in kept) >= FILE_TOKENS:
                _keep(notes.folder / f"text-{files:02d}.npz", kept)
                files, kept = files + 1, []
                notes.keep(tokens=total, files=files, tokens_per_second=round(total / spent, 1))
            if over:
                break


def _keep(path: Path, texts: list[Written]) -> None:
    shard = Shard.of(texts)
    ids = shard.tokens.astype(np.uint16)
    np.savez_compressed(path, tokens=ids, starts=shard.starts, prompts=shard.prompts, temperatures=shard.temperatures)


def train(notes: Notes) -> None:
    """The medium drafter, then the tiny one, learn for some time from the text that `text` has kept; weights are kept."""
    device = "cpu" if notes.small else "cuda:0"
    scoring_s, learning_s = (20.0, 10.0) if notes.small else (20.0, 30.0)
    kept = sorted(notes.folder.glob("text-*.npz"))
    if not kept:
        raise SystemExit("There is no text: run the step text before this one, with the same folder")
    work = notes.folder / "train.work"
    (work / "text").mkdir(parents=True, exist_ok=True)
    teacher = load_trainable(family.full(), dtype=notes.dtype, device=device).requires_grad_(False).eval()
    teacher.set_attn_implementation(CAUSAL)
    begin, total = time.perf_counter(), 0
    for number, shard in enumerate(_shards(kept)):
        score(teacher, shard).save(work / "text" / f"{number:05d}.npz")
        total += len(shard.tokens)
        if time.perf_counter() - begin > scoring_s:
            break
    notes.keep(scored_tokens=total, scoring_s=round(time.perf_counter() - begin, 1))
    del teacher
    (work / SPENT).write_text(json.dumps({"text": 1e9}), encoding="utf-8")  # enough is written
    for name in ("medium", "tiny"):
        plan = Plan(
            cost=0.1,
            hours=learning_s / 3600 / 0.6,
            rows=8 if notes.small else 256,
            max_len=128 if notes.small else LONGEST,
            start=Path(family.path(name)),
        )
        run = Distillation(family.full(), notes.folder / name, plan, work=work, device=device)
        begin = time.perf_counter()
        agreement = run.run()
        results = {"agreement": {str(at): round(share, 4) for at, share in agreement.items()}}
        notes.keep(**{name: results | {"seconds": round(time.perf_counter() - begin, 1)}})


def _shards(files: Iterable[Path]) -> Iterator[Shard]:
    """The texts of files in shards as `cascade distill` keeps them."""
    for path in files:
        with np.load(path) as kept:
            parts = {name: kept[name] for name in kept.files}
        whole = Shard(parts.pop("tokens").astype(np.int32), **parts)
        texts = iter(range(whole.num_texts))
        mean = max(1, len(whole.tokens) // whole.num_texts)
        while some := list(islice(texts, max(1, SHARD_TOKENS // mean))):
            spans = [whole.span(text) for text in some]
            yield Shard.of(
                [
                    Written(whole.tokens[span].tolist(), int(whole.prompts[text]), float(whole.temperatures[text]))
                    for text, span in zip(some, spans, strict=True)
                ]
            )
