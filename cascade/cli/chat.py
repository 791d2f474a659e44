"""`cascade chat`: a conversation, with a server or with models that run here."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import click

from cascade.answer import Completion
from cascade.cli import screen
from cascade.cli.connection import DEFAULT_ADDRESS, Asked, Message, connected
from cascade.cli.options import parameters, sampling_options
from cascade.cli.screen import console
from cascade.errors import CascadeError, InvalidRequest, ModelError
from cascade.params import Handling, SamplingParams, Speculation

HELP = """\
/system TEXT   tell the assistant who it is; without a text no more
/seed N        the same seed, the same answers; without a number: random ones
/stats         what the last answer took, if it was not stopped
/clear         a new conversation
/quit          the end, as Ctrl-D
Ctrl-C stops an answer. A message that begins with / needs a blank before it."""
CLEARED = "/clear begins a new conversation."


@click.command(context_settings={"default_map": {"max_tokens": 512}})
@click.argument("models", nargs=-1)
@click.option("--address", help=f"Of a server. Without one the models run here. Example: {DEFAULT_ADDRESS}")
@click.option("--system", default="", metavar="TEXT", help="Tell the assistant who it is.")
@click.option("--plain", is_flag=True, help="No colours.")
@sampling_options
def chat(models: tuple[str, ...], address: str | None, system: str, plain: bool, **options: Any) -> None:
    """Talk with MODELS, paths or hub ids, bottom to top; with SmolLM2-135M-Instruct and its tiers if none are named.

    The full model's own chat template writes the conversation. Each token is in the colour of the tier whose guess it was.
    /help lists what else can be typed; Ctrl-C stops an answer, Ctrl-D ends.
    """
    if address and models:
        raise click.UsageError("--address names a server and MODELS run here: give one of them")
    params, speculation = parameters(options)
    with connected(address, models) as asked:
        if not asked.has_template():
            raise ModelError("The model has no chat template and holds no conversations: `cascade generate` goes on with texts")
        if not plain:
            console.print(screen.legend(asked.names))
        console.print("/help lists what can be typed.\n", style="dim")
        Talk(asked, params, speculation, system=system, plain=plain).run()


@dataclass(slots=True)
class Talk:
    asked: Asked
    params: SamplingParams
    speculation: Speculation
    system: str = ""
    plain: bool = False
    turns: list[Message] = field(default_factory=list)  # of both, without the system's message
    last: Completion | None = None
    seconds: float = 0.0  # that it took

    def run(self) -> None:
        with contextlib.suppress(ImportError):  # not everywhere
            import readline  # noqa: F401  # gives `input` its history and keys
        while True:
            try:
                line = input("> ")
            except KeyboardInterrupt:  # as in a shell: a new line
                console.print()
                continue
            except EOFError:
                console.print()
                return
            if line.strip() == "/quit":
                return
            if line.startswith("/"):
                self.obey(line)
            elif line.strip():
                self.answer(line.strip())

    def obey(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/system":
                self.system = rest
                console.print("From the next answer on.", style="dim")
            case "/seed":
                try:
                    self.params = replace(self.params, seed=int(rest) if rest else None)
                except ValueError:  # no number, or an InvalidRequest, which is one
                    console.print(f"The seed is {rest!r}: give a number from 0 up, or none.", markup=False, style="red")
            case "/stats":
                self._show_stats()
            case "/clear":
                self.turns.clear()
                self.last = None
                console.print("A new conversation.", style="dim")
            case "/help":
                console.print(HELP, markup=False, style="dim")
            case _:
                console.print(f"There is no {name}: /help lists what there is.", markup=False, style="red")

    def answer(self, said: str) -> None:
        """Let the assistant answer; what is refused, or fails, was not said."""
        self.turns.append({"role": "user", "content": said})
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        begin, text, self.last = time.perf_counter(), "", None
        message: Message | None = None
        try:
            stream = self.asked.stream_chat([*system, *self.turns], self.params, self.speculation, Handling())
            with contextlib.closing(stream), stopping() as stopped:
                for piece in stream:
                    screen.show(piece.chunk, plain=self.plain)
                    text += piece.chunk.text
                    if piece.message is not None:
                        message, self.last, self.seconds = piece.message, piece.chunk.completion, time.perf_counter() - begin
                    if stopped():
                        break
        except CascadeError as error:
            del self.turns[-1]
            way = f" {CLEARED}" if isinstance(error, InvalidRequest) and self.turns else ""
            console.print(f"{str(error).rstrip('.')}.{way}", markup=False, style="red", soft_wrap=True)
            return
        except KeyboardInterrupt:  # the second one: nothing came after the first
            pass
        console.print()
        if message is None:
            console.print("(stopped)", style="dim")
            message = {"role": "assistant", "content": text} if text.strip() else None
        elif self.last is not None and self.last.finish_reason == "length":
            console.print(f"(stopped after {self.params.max_tokens} tokens, see --max-tokens)", style="dim")
        if message is None:
            del self.turns[-1]
        else:
            self.turns.append(message)
        if self.params.logprobs is not None and self.last is not None and message is not None:
            console.print(screen.logprobs(self.last))

    def _show_stats(self) -> None:
        if self.last is None:
            console.print("There is no whole answer yet.", style="dim")
            return
        stats = self.last.stats
        console.print(screen.took(self.last, self.seconds))
        console.print(f"{len(self.turns)} messages, {stats.prompt_tokens + stats.completion_tokens} tokens with this answer")
        if any(edge.drafter for edge in stats.edges):
            console.print(screen.acceptance(stats.edges))


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Says whether Ctrl-C was pressed, which breaks nothing off; pressed again, it raises as ever."""
    pressed = False
    before = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
