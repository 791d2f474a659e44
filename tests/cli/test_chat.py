"""`cascade chat`: conversations at a terminal, with models of this process and with a server."""

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from cascade import Cascade, SamplingParams
from cascade.cli.chat import stopping
from cascade.cli.main import main
from cascade.engine.tokenizer import Tokenizer
from tests.doors import house
from tests.small import paths
from tests.talkers import talking
from tests.waiting import LONG_S

FIRST, SECOND = "def read(path):", "class Reader:"
AT_TERMINAL = "import os; os.close(os.open(os.ttyname(0), os.O_RDWR)); from cascade.cli.main import main; main()"
ASKS = r"\n(\x1b\[\?2004h)?> "  # the prompt, before which readline says that it takes pasted lines
EIGHT = SamplingParams(max_tokens=8, temperature=0)


def run(*arguments: str, said: str) -> tuple[int, str]:
    """Exit code and output of `cascade chat`, if these lines are typed."""
    result = CliRunner().invoke(main, ["chat", "--max-tokens", "8", "-t", "0", *arguments], input=said)
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


class Terminal:
    """`cascade chat` at a terminal of its own."""

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
        while not (found := re.search(expected, self.seen)):
            assert time.monotonic() < deadline, self.seen
            try:
                self.seen += os.read(self._end, 65536).decode(errors="replace")
            except OSError:  # it has ended
                pytest.fail(f"{expected!r} never came: {self.seen}")
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
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
    code, output = run(*paths()[:1], "--plain", said=f"{FIRST}\n{SECOND}\n")
    assert code == 0, output
    messages = [{"role": "user", "content": FIRST}]
    with Cascade.from_pretrained(paths()[:1]) as cascade:
        for number in range(2):
            prompt = cascade.tokenizer.backend.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = cascade.tokenizer.encode_part(prompt)
            answer = cascade.generate(ids, EIGHT).text
            assert answer.strip() in output, number
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": SECOND}]


def test_commands_change_what_follows(tmp_path: Path) -> None:
    """Guards commands against being sent as messages, and against having no effect."""
    with talking(tmp_path, "hermes") as served:
        first, then = ["/stats", "one two", "/stats"], ["/system You are kind.", "/seed 7", "again", "/stats"]
        last = ["/clear", "/stats", " /x", "/nothing", "/seed z", "/quit", "no"]
        code, output = run("--address", served.grpc, "--plain", said="\n".join([*first, *then, *last]))
        served.settle()
    assert code == 0, output
    assert "one two" in output  # parrots say what they were told
    assert output.count("There is no whole answer yet.") == 2
    short, long = (int(tokens) for tokens in re.findall(r"messages, (\d+) tokens", output))
    assert long > short + 4  # the system's message, the first turn
    assert "seed 7" in output
    assert "> /x" in output
    assert "There is no /nothing" in output
    assert "'z'" in output
    assert not output.rstrip().endswith("no")


def test_long_conversations_say_how_to_go_on() -> None:
    """Guards the end of the context: one sentence, the refused message is not kept, and /clear makes room."""
    with Cascade.from_pretrained(paths()[:1]) as cascade:
        room = cascade.context_len
    long = "x = 1; " * (room // 4)
    code, output = run(*paths()[:1], "--plain", said=f"{FIRST}\n{long}\n/clear\n{SECOND}\n/stats\n")
    assert code == 0, output
    assert f"the models take {room}" in output
    assert "/clear begins a new conversation." in output
    assert "2 messages" in output


def test_without_a_template_there_is_generate(tmp_path: Path) -> None:
    """Guards base models, here and served, against questions that they cannot take."""
    backend = Tokenizer.from_pretrained(paths()[0]).backend
    source = tmp_path / "base"
    source.mkdir()
    for file in Path(paths()[0]).iterdir():
        if file.name != "chat_template.jinja":
            (source / file.name).write_bytes(file.read_bytes())
    assert Tokenizer.from_pretrained(str(source)).backend.chat_template is None
    assert backend.chat_template is not None
    code, output = run(str(source), said="hello\n")
    assert code == 1
    assert "cascade generate" in output
    with house(full={"model_loading_config": {"model_source": str(source)}}) as served:
        code, output = run("--address", served.grpc, said="hello\n")
    assert code == 1
    assert "cascade generate" in output


def test_a_server_or_models_not_both() -> None:
    """Guards models that are named and would not be asked."""
    code, output = run("somewhere", "--address", "127.0.0.1:1", said="")
    assert code == 2
    assert "--address" in output


def test_ctrl_c_stops_an_answer_and_ctrl_d_the_program(tmp_path: Path) -> None:
    """Guards the terminal: an answer that is stopped is kept as far as it came, the request ends, the program goes on."""
    with talking(tmp_path, "hermes", pass_s=0.02) as served:
        terminal = Terminal("--address", served.grpc, "-t", "0", "--mode", "off", "--plain")
        terminal.until(ASKS)
        terminal.type(" ".join(f"w{n}" for n in range(100)) + "\n")
        terminal.until("w99")  # the echo of what was typed
        terminal.until("w1")
        terminal.type("\x03")
        shown = terminal.until(r"\(stopped\)")
        assert "w99" not in shown
        served.settle()
        terminal.until(ASKS)
        terminal.type("\x03")  # at the prompt: a new one
        terminal.until(ASKS)
        terminal.type("well\n/stats\n")
        assert "4 messages" in terminal.until(r"\d messages")
        terminal.until(ASKS)
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "Traceback" not in terminal.seen


def test_colours_and_keys_at_a_terminal(tmp_path: Path) -> None:
    """Guards answers without colours, and keys that leave signs in a message: the arrow up brings the last line back."""
    with talking(tmp_path, "hermes", pass_s=0.002) as served:
        terminal = Terminal("--address", served.grpc, "-t", "0", "--tiers", "tiny,medium")
        terminal.until(ASKS)
        terminal.type("one two\n")
        assert re.search(r"\x1b\[38;[25];[\d;]*m *two", terminal.until(ASKS))
        terminal.type("\x1b[A\n")
        terminal.until("one two")
        terminal.until(ASKS)
        terminal.type("/stats\n")
        assert "4 messages" in terminal.until("medium → full")
        terminal.until(ASKS)
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_a_second_ctrl_c_breaks_off() -> None:
    """Guards answers of which nothing comes: the first Ctrl-C waits for the next piece, the second does not."""
    with stopping() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
