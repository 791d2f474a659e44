"""A worker: loads one engine, then answers turns, until its input ends.

    python -m benchmarks.peers.worker '{"engine": "transformers", ...}'

Whatever libraries print goes to standard error; standard output has one JSON document a line.
"""

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from typing import Any, TextIO

from benchmarks.peers.contract import Engine, Setup, Turn, parsed_setup


def answers() -> TextIO:
    """The standard output, which nobody else has from now on."""
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return own


def load(setup: Setup) -> Engine:
    engine: Engine = importlib.import_module(f"benchmarks.peers.engines.{setup.engine}").load(setup)
    return engine


def respond(engine: Engine, line: str) -> dict[str, Any]:
    """What a turn gave, or why it gave nothing: one mode that fails leaves the others."""
    try:
        return asdict(engine.generate(Turn(**json.loads(line))))
    except Exception as error:  # of any library
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    out = answers()
    try:
        engine = load(parsed_setup(json.loads(sys.argv[1])))
    except Exception as error:  # of any library
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out)
        return
    print(json.dumps({"versions": dict(engine.versions)}), file=out)
    for line in sys.stdin:
        print(json.dumps(respond(engine, line)), file=out)
    engine.close()


if __name__ == "__main__":  # vLLM's own processes import this module again
    main()
