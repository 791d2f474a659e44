"""`cascade demo`: a few questions to a served cascade, and a comparison with its full model alone."""

import json
import secrets
import time
from dataclasses import replace
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from cascade.answer import Completion
from cascade.cli import screen
from cascade.cli.config import configured
from cascade.cli.connection import Local, Served, connected, user_turn
from cascade.cli.screen import console
from cascade.cli.serve import started
from cascade.messages import add_edges
from cascade.params import Handling, SamplingParams, Speculation

LINES = (Path(__file__).parent / "questions.jsonl").read_text(encoding="utf-8").splitlines()
QUESTIONS: dict[str, str] = {line["category"]: line["prompt"] for line in map(json.loads, LINES)}  # by kind
PARAMS = SamplingParams(max_tokens=96, temperature=0, seed=1)
MODES = {"full alone": Speculation("off"), "cascade": Speculation()}
COMPARED = ("code", "mathematics", "rewrite")  # kinds of the questions that both modes answer, at each temperature
COMPARED_TOKENS = 64  # of such an answer at most: the whole is to be over in a minute, on two cores
WARM_TOKENS = 16  # likewise of the first answer of each, which does not count


@click.command()
def demo() -> None:
    """Serve the models that ship, ask them five questions, compare with the full model alone, shut down."""
    name = f"cascade-demo-{secrets.token_hex(3)}"  # on a cluster that is joined others may run
    with started(configured(None), port=0, name=name) as server, connected(server.address) as served:
        console.print(screen.legend(served.names))
        for kind, question in QUESTIONS.items():
            answer(served, kind, question)
        for temperature in (0.0, 0.7):
            compare(served, temperature)


def answer(served: Local | Served, kind: str, question: str) -> None:
    """Ask and print, each token in the colour of the tier that guessed it."""
    console.print(f"\n[bold]{kind.capitalize()}[/]")
    console.print(question, style="dim", markup=False)
    shown = screen.Answer()
    for piece in served.stream_chat(user_turn(question), PARAMS, Speculation(), Handling()):
        shown.show(piece.chunk)
        if (completion := piece.chunk.completion) is not None:
            more = " ..." if completion.finish_reason == "length" else ""
            console.print(f"{more}\n[dim]{screen.summary(completion)}[/]")


def compare(served: Local | Served, temperature: float) -> None:
    """Have the full model alone and the cascade answer some of the questions in turns; print how fast each was."""
    params = replace(PARAMS, max_tokens=COMPARED_TOKENS, temperature=temperature)
    for mode in MODES:
        timed(served, QUESTIONS[COMPARED[0]], replace(params, max_tokens=min(WARM_TOKENS, COMPARED_TOKENS)), mode)
    columns = ("question", *(f"{mode}, tokens/s" for mode in MODES), "speed-up")
    table = Table(*(Column(name, no_wrap=True) for name in columns), title=f"Temperature {temperature:g}", box=SIMPLE_HEAD)
    answers: dict[str, list[Completion]] = {mode: [] for mode in MODES}
    for number, kind in enumerate(COMPARED):
        speeds = dict.fromkeys(MODES, 0.0)
        for mode in list(MODES)[:: 1 if number % 2 else -1]:  # in turns, so that none is favoured by always coming first
            completion, seconds = timed(served, QUESTIONS[kind], params, mode)
            answers[mode].append(completion)
            speeds[mode] = completion.stats.completion_tokens / seconds
        alone, cascade = speeds.values()
        table.add_row(kind, f"{alone:.1f}", f"{cascade:.1f}", f"{cascade / alone:.2f}x")
    console.print("\n", table, sep="")
    console.print(screen.acceptance(add_edges({}, (edge for one in answers["cascade"] for edge in one.stats.edges)).values()))
    texts = [[one.token_ids for one in said] for said in answers.values()]
    same = texts[0] == texts[1]
    console.print("Both modes gave the same text." if same else "[bold red]The modes gave different texts.[/]")


def timed(served: Local | Served, question: str, params: SamplingParams, mode: str) -> tuple[Completion, float]:
    """The answer in a mode, which knows nothing of other answers, and the seconds that it took."""
    begin = time.perf_counter()
    handling = Handling(cache_salt=secrets.token_hex())
    *_, last = served.stream_chat(user_turn(question), params, MODES[mode], handling)
    assert last.chunk.completion is not None, "a stream ends with its completion"
    return last.chunk.completion, time.perf_counter() - begin
