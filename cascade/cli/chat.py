"""`cascade chat` and `cascade generate`: answers of a server, or of models in this process."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import click

from cascade.answer import Chunk, Completion
from cascade.cli import screen
from cascade.cli.options import parameters, sampling_options
from cascade.cli.screen import console
from cascade.errors import CascadeError, InvalidRequest
from cascade.params import Handling, SamplingParams, Speculation

if TYPE_CHECKING:  # one needs PyTorch, the other gRPC, and both start slowly
    from cascade.client import Client
    from cascade.local import Cascade

Message: TypeAlias = Mapping[str, Any]  # as in OpenAI's API

DEFAULT_ADDRESS = "127.0.0.1:9000"


class Piece(NamedTuple):
    """A piece of the assistant's turn; the last one has the whole turn, as a message for the next request."""

    chunk: Chunk
    message: Message | None = None


class Backend(NamedTuple):
    """A server, or models in this process."""

    names: tuple[str, ...]  # drafters and tiers, bottom to top
    default_params: SamplingParams
    # continue a text and a conversation, with parameters, speculation and handling; both raise `InvalidRequest`
    stream: Callable[[str, SamplingParams, Speculation, Handling], Iterator[Chunk]]
    stream_chat: Callable[[Sequence[Message], SamplingParams, Speculation, Handling], Iterator[Piece]]


def local(cascade: "Cascade") -> Backend:
    from cascade.chat.template import ChatTemplate
    from cascade.llm import prompt_of

    template = ChatTemplate(cascade.tokenizer)

    def stream_chat(
        messages: Sequence[Message], params: SamplingParams, speculation: Speculation, handling: Handling
    ) -> Iterator[Piece]:
        ids = cascade.tokenizer.encode_part(prompt_of(template, messages))
        for chunk in cascade.stream(ids, params, speculation, handling):
            whole = chunk.completion
            yield Piece(chunk, None if whole is None else {"role": "assistant", "content": whole.text})

    return Backend(cascade.names, cascade.default_params, cascade.stream, stream_chat)


def served(client: "Client") -> Backend:
    info = client.describe()

    def stream_chat(
        messages: Sequence[Message], params: SamplingParams, speculation: Speculation, handling: Handling
    ) -> Iterator[Piece]:
        for piece in client.stream_chat(messages, params, speculation, handling):
            yield Piece(piece.chunk, piece.turn.message if piece.turn is not None else None)

    names = (*info.drafters, *(tier.name for tier in info.tiers))
    return Backend(names, info.defaults, client.stream, stream_chat)


@contextlib.contextmanager
def connected(address: str | None, models: tuple[str, ...] = ()) -> Iterator[Backend]:
    """The server at ``address``, or ``models`` in this process, bottom to top, by default those that ship.

    Raises `click.UsageError` if both are given.
    """
    if address and models:
        raise click.UsageError("--address names a server and models run here: give one of them")
    if address:
        from cascade.client import Client

        with Client(address) as client:
            yield served(client)
        return
    if not models:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the models that ship load at once
    from cascade.local import Cascade

    with console.status("Loading models"):
        cascade = Cascade.from_pretrained(models) if models else Cascade.demo()
    with cascade:
        yield local(cascade)


HELP = """\
/system TEXT   set the system message; without a text remove it
/seed N        use the same seed for all answers; without a number a random one each time
/stats         statistics of the last answer, by pairs of tiers
/clear         begin a new conversation
/quit          end, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with / needs a blank before it."""


@click.command(context_settings={"default_map": {"max_tokens": 512}})
@click.argument("models", nargs=-1)
@click.option("--address", help=f"A server's gRPC address, such as {DEFAULT_ADDRESS}; by default the models run here.")
@click.option("--system", default="", metavar="TEXT", help="System message.")
@click.option("--plain", is_flag=True, help="No colours, no statistics.")
@sampling_options
def chat(models: tuple[str, ...], address: str | None, system: str, plain: bool, **options: Any) -> None:
    """Chat with MODELS, paths or hub ids, bottom to top; by default with SmolLM2-135M-Instruct and its drafts.

    Each token has the colour of the tier that guessed it. /help lists commands; Ctrl-C stops an answer,
    Ctrl-D ends.
    """
    sampled, speculation = parameters(options)
    with connected(address, models) as backend:
        if not plain:
            console.print(screen.legend(backend.names))
        console.print("/help lists commands.\n", style="dim")
        Conversation(backend, sampled(backend.default_params), speculation, system, plain).run()


@dataclass(slots=True)
class Conversation:
    """Turns of the user and the assistant, and the parameters of the next request."""

    backend: Backend
    params: SamplingParams
    speculation: Speculation
    system: str
    plain: bool
    turns: list[Message] = field(default_factory=list)  # the user's and the assistant's
    last: Completion | None = None  # the last answer, unless it was stopped

    def run(self) -> None:
        """Read lines until the end of the input."""
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
                self.run_command(line)
            elif line.strip():
                self.answer(line.strip())

    def run_command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/system":
                self.system = rest
                console.print("From the next answer on.", style="dim")
            case "/seed":
                try:
                    self.params = replace(self.params, seed=int(rest) if rest else None)
                except ValueError:  # not a number, or out of range
                    console.print(f"The seed is {rest!r}: give a number from 0 up, or none.", markup=False, style="red")
            case "/stats":
                if self.last is None:
                    console.print("There is no whole answer yet.", style="dim")
                else:
                    console.print(screen.summary(self.last), screen.acceptance(self.last.stats.edges), sep="\n")
            case "/clear":
                self.turns.clear()
                self.last = None
                console.print("A new conversation.", style="dim")
            case "/help":
                console.print(HELP, style="dim")
            case _:
                console.print(f"There is no {name}: /help lists what there is.", markup=False, style="red")

    def answer(self, text: str) -> None:
        """Let the assistant answer. A question that is refused, or fails, is not kept."""
        self.turns.append({"role": "user", "content": text})
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        try:
            stream = self.backend.stream_chat([*system, *self.turns], self.params, self.speculation, Handling())
            message, completion = self._show(stream)
        except CascadeError as error:
            del self.turns[-1]
            way = " /clear begins a new conversation." if isinstance(error, InvalidRequest) and self.turns else ""
            console.print(f"{str(error).rstrip('.')}.{way}", markup=False, style="red", soft_wrap=True)
            return
        console.print()
        self.last = completion
        if completion is None:
            console.print("(stopped)", style="dim")
        elif completion.finish_reason == "length":
            console.print(f"(stopped after {self.params.max_tokens} tokens, see --max-tokens)", style="dim")
        if completion is not None and not self.plain:
            console.print(screen.summary(completion), style="dim")
        if message["content"].strip() or completion is not None:
            self.turns.append(message)
        else:
            del self.turns[-1]

    def _show(self, stream: Iterator[Piece]) -> tuple[Message, Completion | None]:
        """Print an answer as it comes; returns what came of it before it ended or Ctrl-C stopped it."""
        text, shown = "", screen.Answer(plain=self.plain)
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(stream), stopping() as stopped:  # type: ignore[type-var]
            for piece in stream:
                shown.show(piece.chunk)
                text += piece.chunk.text
                if piece.message is not None:
                    return piece.message, piece.chunk.completion
                if stopped():
                    break
        shown.end()
        return {"role": "assistant", "content": text}, None


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Record the first Ctrl-C; the yielded function tells whether it was pressed. A second one raises `KeyboardInterrupt`.

    If the first one raised at once, it might interrupt gRPC while that holds a lock, which would then never be released.
    """
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


@click.command()
@click.argument("prompt")
@click.option("--address", help=f"A server's gRPC address, such as {DEFAULT_ADDRESS}; by default the models run here.")
@click.option(
    "--model", "models", multiple=True, help="Path or hub id, bottom to top; repeat. By default the models that ship."
)
@click.option("--plain", is_flag=True, help="No colours, no statistics.")
@sampling_options
def generate(prompt: str, address: str | None, models: tuple[str, ...], plain: bool, **options: Any) -> None:
    """Continue PROMPT ("-" reads it from standard input), and stream the text. For conversations see `cascade chat`."""
    sampled, speculation = parameters(options)
    prompt = sys.stdin.read() if prompt == "-" else prompt
    with connected(address, models) as backend:
        chunks = backend.stream(prompt, sampled(backend.default_params), speculation, Handling())
        if plain:
            for chunk in chunks:
                click.echo(chunk.text, nl=False)
            click.echo()
            return
        console.print(screen.legend(backend.names), "\n")
        console.print(prompt, end="", style="dim", markup=False)
        shown = screen.Answer(after=prompt)
        for chunk in chunks:
            shown.show(chunk)
            if chunk.completion is not None:
                console.print(f"\n\n{screen.summary(chunk.completion)}\n")
                console.print(screen.acceptance(chunk.completion.stats.edges))
