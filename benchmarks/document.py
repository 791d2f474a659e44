"""What all benchmarks share: their arguments, what they show on the way, and the JSON document that they leave."""

import argparse
import datetime
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console

from cascade import family
from cascade.engine.devices import processor
from cascade.engine.model_config import read_config

RESULTS = Path(__file__).parent / "results"
LEAF = re.compile(r"[\[{][^\[\]{}]*[\]}]")  # of JSON: what holds no other list or object
STAMPS = {"dates": "date", "processors": "processor"}  # what a document says of single parts, and of all others
console = Console(stderr=True, highlight=False)
T = TypeVar("T")


def parser(name: str, about: str, parts: Sequence[str] = (), *, quick: bool = True) -> argparse.ArgumentParser:
    """The arguments of ``python -m benchmarks.<name>``, which each benchmark may add to."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    if quick:
        made.add_argument("--quick", action="store_true", help="few tokens: whether it works, not how fast")
    made.add_argument(
        "--results", type=Path, help=f"where the document is kept; of a whole run, benchmarks/results/{name}.json"
    )
    if parts:
        made.add_argument("--only", nargs="+", choices=parts, help="parts that are measured; all if not given")
    made.set_defaults(name=name)
    return made


def quiet() -> None:
    """Let libraries say no more than they must."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for: ``results`` is `None` if the document is only printed."""
    quiet()
    chosen = parser.parse_args(arguments)
    whole = not getattr(chosen, "quick", False) and getattr(chosen, "only", None) is None
    if chosen.results is None and whole:
        chosen.results = RESULTS / f"{chosen.name}.json"
    return chosen


def timed(label: str, work: Callable[[], T]) -> T:
    """The result of ``work``; how long it took is shown."""
    begin = time.perf_counter()
    result = work()
    console.print(f"[bold]{label}[/]: {time.perf_counter() - begin:.0f} s")
    return result


def stamp(models: object = None) -> dict[str, Any]:
    """Date, processor and models, without which figures mean nothing: the package's family unless others are named."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "family": models or dict(zip(family.NAMES, map(shape, family.paths()), strict=True)),
    }


def dated(document: dict[str, Any], parts: Iterable[str]) -> dict[str, Any]:
    """The document, which says when and where these parts were measured: others may be of other runs."""
    here = stamp(document["family"])
    own = {name: {**document.get(name, {}), **dict.fromkeys(parts, here[of])} for name, of in STAMPS.items()}
    return document | own


def titled(beginning: str) -> list[int]:
    """Process ids below this process whose titles begin so: Ray's tell what runs in them."""
    pids = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if " ".join(child.cmdline()).startswith(beginning):
                pids.append(child.pid)
    return pids


def shape(source: str) -> str:
    """Of a model, such as ``llama, 30 layers of 576, 49152 tokens``."""
    config = read_config(source)
    return f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}, {config.vocab_size} tokens"


def lossless(document: Any) -> bool:
    """Whether no figure of a document, however deep, is of texts that differ."""
    if not isinstance(document, dict):
        return True
    return document.get("same_text", True) and all(map(lossless, document.values()))


def keep(document: dict[str, Any], path: Path) -> None:
    """Write a document, each innermost list or object on a line."""
    path.parent.mkdir(exist_ok=True)
    text = LEAF.sub(lambda leaf: re.sub(r"\n\s*", " ", leaf[0]), json.dumps(document, indent=1))
    path.write_text(text + "\n", encoding="utf-8")


def finish(document: dict[str, Any], line: dict[str, Any], results: Path | None) -> None:
    """Keep the document, print its last line, and end the run with an error if modes gave different texts."""
    if results is not None:
        keep(document, results)
    print(json.dumps(line))
    if not lossless(document):
        raise SystemExit("Modes gave different texts")
