"""Steps of training on one GPU: vLLM writes the text, and the drafters of the family learn from it."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.gpu.step import Notes
from cascade import family
from cascade.engine.generation import configured_ends
from cascade.engine.model import Model
from cascade.engine.tokenizer import pretrained
from cascade.engine.vllm.model import VllmModel
from cascade.training.recipe import SPENT, Distillation, Plan
from cascade.training.text import SHARD_TOKENS, Shard, Text, score
from cascade.training.writing import Turns, own_prompts, write

ROWS, LONGEST = 448, 512  # texts at a time, which leave room in the largest graph for prompts of others; tokens of one
FILE_TOKENS = 4_000_000  # 8 MB
LEAST = 5_000_000  # tokens that are wanted


def text(notes: Notes) -> None:
    """vLLM writes conversations of the full model; they are kept as 16-bit token ids."""
    rows, longest, seconds, wanted = (8, 48, 20.0, 400) if notes.small else (ROWS, LONGEST, 25.0, 2 * LEAST)
    source = family.full()
    turns = Turns.of(pretrained(source), configured_ends(source))
    options = notes.options(max_model_len=longest)
    room = rows * (longest + 64)  # and part of a block each
    with closing(VllmModel(source, cache_tokens=room, max_sessions=rows, options=options)) as model:
        begin, total, kept = time.perf_counter(), 0, list[Text]()
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


def _keep(path: Path, texts: list[Text]) -> None:
    shard = Shard.of(texts)
    names = ("starts", "prompts", "temperatures", "held_out")
    np.savez_compressed(path, tokens=shard.tokens.astype(np.uint16), **{name: getattr(shard, name) for name in names})


def train(notes: Notes) -> None:
    """The medium drafter, then the tiny one, learn for some time from the text that `text` has kept; weights are kept."""
    device = "cpu" if notes.small else "cuda:0"
    scoring_s, learning_s = (20.0, 10.0) if notes.small else (20.0, 30.0)
    kept = sorted(notes.folder.glob("text-*.npz"))
    if not kept:
        raise SystemExit("There is no text: run the step text before this one, with the same folder")
    work = notes.folder / "train.work"
    (work / "text").mkdir(parents=True, exist_ok=True)
    teacher = Model.from_pretrained(family.full(), dtype=notes.dtype, device=device)  # vLLM's passes tell no logits
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
        many = max(1, SHARD_TOKENS * whole.num_texts // len(whole.tokens))  # texts of a shard
        for begin in range(0, whole.num_texts, many):
            yield Shard.of(
                [
                    Text(
                        whole.tokens[whole.span(text)].tolist(),
                        int(whole.prompts[text]),
                        float(whole.temperatures[text]),
                        bool(whole.held_out[text]),
                    )
                    for text in range(begin, min(begin + many, whole.num_texts))
                ]
            )
