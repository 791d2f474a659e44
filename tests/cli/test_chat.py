"""`cascade chat`: conversations at a terminal, with models of this process and with a server."""

import io
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from cascade import Cascade, Chunk, SamplingParams, Speculation
from cascade.cli import screen
from cascade.cli.chat import Conversation, Piece, stopping
from tests.cli import run
from tests.in_process import house
from tests.small import paths
from tests.talkers import talking
from tests.waiting import LONG_S

FIRST, SECOND = "def read(path):", "class Reader:"
AT_TERMINAL = "import os; os.close(os.open(os.ttyname(0), os.O_RDWR)); from cascade.cli.main import main; main()"
ASKS = r"\n(\x1b\[\?2004h)?> "  # the prompt, before which readline says that it takes pasted lines
EIGHT = SamplingParams(max_tokens=8, temperature=0)


def chat(*arguments: str, typed: str) -> tuple[int, str]:
    return run("chat", "--max-tokens", "8", "-t", "0", *arguments, input=typed)


class Terminal:
    def __init__(self, *arguments: str) -> None:
        self._end, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (50, 500))  # nothing is wrapped
        command = [sys.executable, "-c", AT_TERMINAL, "chat", *arguments]
        environment = os.environ | {"TERM": "xterm-256color"}
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, expected: str) -> str:
        """What is shown up to and with the first match of ``expected``, which no later call sees again."""
        deadline = time.monotonic() + LONG_S
        while not (match := re.search(expected, self.seen)):
            assert time.monotonic() < deadline, self.seen
            try:
                self.seen += os.read(self._end, 65536).decode(errors="replace")
            except OSError:  # it has ended
                pytest.fail(f"{expected!r} never came: {self.seen}")
        shown, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return shown

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        while True:
            try:
                self.seen += os.read(self._end, 65536).decode(errors="replace")
            except OSError:
                break
        os.close(self._end)
        return self._process.wait(LONG_S)


def test_history_goes_through_the_template() -> None:
    """Guards the second turn: it was to be what the model says after the whole conversation, in its own template's words."""
    code, output = chat(*paths()[:1], "--plain", typed=f"{FIRST}\n{SECOND}\n")
    assert code == 0, output
    messages = [{"role": "user", "content": FIRST}]
    with Cascade.from_pretrained(paths()[:1]) as cascade:
        for number in range(2):
            prompt = cascade.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            ids = cascade.tokenizer.encode_part(prompt)
            answer = cascade.generate(ids, EIGHT).text
            assert answer.strip() in output, number
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": SECOND}]


def test_commands_change_what_follows() -> None:
    """Guards commands against being sent as messages, and against having no effect."""
    with talking("hermes") as served:
        first, then = (
            ["/stats", "one two", "/system You are kind.", "/seed 7", "one two", "/stats"],
            ["/clear", "/stats", " /x"],
        )
        lines = [*first, *then, "/nothing", "/seed z", "/seed -2", "/quit", "no"]
        code, output = chat("--address", served.grpc, typed="\n".join(lines))
        served.settle()
    assert code == 0, output
    assert "one two" in output  # parrots say what they were told
    assert output.count("There is no whole answer yet.") == 2
    assert output.count("full passes") == 4  # one line an answer, one of `/stats`
    assert output.count("seed 7") == 3  # of the second answer, its statistics, and the answer after `/clear`
    assert output.count("→ full") > 0
    assert "'z'" in output
    assert "'-2'" in output
    assert "> /x" in output
    assert "There is no /nothing" in output
    assert not output.rstrip().endswith("no")


def test_long_conversations_say_how_to_go_on() -> None:
    """Guards the end of the context: one sentence, the refused message is not kept, and /clear makes room."""
    with Cascade.from_pretrained(paths()[:1]) as cascade:
        room = cascade.context_len
    long = "x = 1; " * (room // 4)
    code, output = chat(*paths()[:1], "--plain", typed=f"{FIRST}\n{long}\n/clear\n{SECOND}\n")
    assert code == 0, output
    assert f"maximum context length is {room} tokens" in output
    assert "/clear begins a new conversation." in output
    assert output.rstrip().endswith("see --max-tokens)\n>")


def test_without_a_template_a_question_is_refused(tmp_path: Path) -> None:
    """Guards base models, here and served, against questions that they cannot take."""
    source = str(shutil.copytree(paths()[0], tmp_path / "base", ignore=shutil.ignore_patterns("chat_template.jinja")))
    with house(full={"model_loading_config": {"model_source": source}}) as served:
        for named in ((source,), ("--address", served.grpc)):
            code, output = chat(*named, typed="hello\n")
            assert (code, "has no chat template" in output) == (0, True), named


def test_a_terminal() -> None:
    """Guards the terminal: colours, the last line brought back, Ctrl-C that stops an answer and no more, Ctrl-D."""
    with talking("hermes", pass_s=0.02) as served:
        terminal = Terminal("--address", served.grpc, "-t", "0", "--tiers", "tiny,medium")
        terminal.until(ASKS)
        terminal.type("one two\n")
        assert re.search(r"\x1b\[38;[25];[\d;]*m *two", terminal.until(ASKS))
        terminal.type("\x1b[A\n")
        terminal.until("one two")
        terminal.until("full passes")
        terminal.until(ASKS)
        terminal.type(" ".join(f"w{n}" for n in range(100)) + "\n")
        terminal.until("w99")  # the echo of what was typed
        terminal.until(r"\x1b\[38;[25];[\d;]*m *w")
        terminal.type("\x03")
        shown = terminal.until(r"\(stopped\)")
        assert "99" not in shown
        served.settle()
        terminal.until(ASKS)
        terminal.type("\x03")  # at the prompt: a new one
        terminal.until(ASKS)
        terminal.type("well\n")
        assert "well" in terminal.until(ASKS)
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "Traceback" not in terminal.seen


def test_what_came_of_a_stopped_answer_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the next turn: the model is to know what the user has read; what came to nothing was never asked."""

    def stream(messages: list[object], *how: object) -> Iterator[Piece]:
        if len(messages) > 1:
            yield Piece(Chunk("It is", (), (5,), bytes(1), None))
        raise KeyboardInterrupt

    backend = SimpleNamespace(stream_chat=stream)
    conversation = Conversation(backend, EIGHT, Speculation(), system="", plain=True)
    conversation.answer("who")
    assert conversation.turns == []
    conversation.system = "You are kind."
    conversation.answer("why")
    assert [turn["content"] for turn in conversation.turns] == ["why", "It is"]
    assert capsys.readouterr().out.count("(stopped)") == 2


def test_a_second_ctrl_c_breaks_off() -> None:
    """Guards answers of which nothing comes: the first Ctrl-C waits for the next piece, the second does not."""
    with stopping() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


TEXT = "Speculative decoding lets smaller models run ahead.\n\nIt changes no token: 你好世界你好世界你好 " + "x" * 50 + " end"


def pieces(text: str) -> list[Chunk]:
    """Of three letters, as tokens are: most words come in several."""
    cut = [text[i : i + 3] for i in range(0, len(text), 3)]
    return [Chunk(part, token_ids=(7,), ends=(len(part),), origins=b"\0") for part in cut]


@pytest.mark.parametrize("width", [12, 20, 31])
@pytest.mark.parametrize("plain", [False, True])
def test_words_are_not_broken_at_the_end_of_a_line(monkeypatch: pytest.MonkeyPatch, width: int, plain: bool) -> None:
    """Guards words that came in pieces: a terminal broke them wherever its line ended."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, highlight=False, no_color=True)
    monkeypatch.setattr(screen, "console", console)
    answer = screen.Answer(plain=plain)
    for chunk in pieces(TEXT):
        answer.show(chunk)
    answer.end()
    shown = out.getvalue()
    assert shown.split() == TEXT.split() or "".join(shown.split()) == "".join(TEXT.split())
    for line in shown.split("\n"):
        assert len(line.rstrip()) <= width or "x" * width in line or "你" in line
    for word in ("Speculative", "decoding", "smaller", "changes", "token:"):
        assert word in shown or len(word) > width
    assert ahead(shown) == ahead(TEXT), "a new line is not lost"


def ahead(text: str) -> int:
    return text.count("\n\n")
