"""`tpserve chat` as a user has it: in a terminal of its own, and in a pipe."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.chat.stub import CUT, DONE, FINISH, HOLD, LIMIT_S, Stub, delta, error, event
from tpserve import cli

# As `python -m tpserve.cli`, with stdin as the terminal that controls it: so Ctrl-C is a signal.
IN_TERMINAL = (
    "import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); runpy.run_module('tpserve.cli', run_name='__main__')"
)
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def environment(**more: str) -> dict[str, str]:
    """This process's, but of a terminal with colours and UTF-8."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TPSERVE_API_KEY")}
    return inherited | {"TERM": "xterm", "LC_ALL": "C.UTF-8", **more}


class Terminal:
    """The command in a terminal; `seen` is all that it showed."""

    def __init__(self, *args: str, **env: str):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, "chat", *args],
            stdin=slave, stdout=slave, stderr=slave, env=environment(**env), start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""
        self._bytes = b""
        self._place = 0

    def type(self, keys: str) -> None:
        """As if from the keyboard."""
        os.write(self.master, keys.encode())

    def expect(self, text: str) -> str:
        """Wait until it shows this, after what was expected before. Returns what came in between."""
        deadline = time.monotonic() + LIMIT_S
        while (place := self.seen.find(text, self._place)) < 0:
            assert select.select([self.master], [], [], deadline - time.monotonic())[0], f"no {text!r}: {self.seen!r}"
            self._bytes += os.read(self.master, 4096)
            self.seen = self._bytes.decode(errors="replace")
        between = self.seen[self._place : place]
        self._place = place + len(text)
        return between

    def ask(self, line: str) -> str:
        """Type a line and return what is shown until the next prompt, without colours."""
        self.type(f"{line}\n")
        self.expect("\r\n")  # the echo of the line
        return re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", self.expect("> ")).replace("\r\n", "\n")

    def end(self) -> int:
        """The exit status."""
        status = self.process.wait(LIMIT_S)
        os.close(self.master)
        return status


Open = Callable[..., Terminal]
Piped = Callable[..., tuple[int, str, str]]


@pytest.fixture
def opened(stub: Stub) -> Iterator[Open]:
    """Opens terminals with a chat that has shown its prompt."""
    terminals: list[Terminal] = []

    def open_(*args: str, **env: str) -> Terminal:
        terminals.append(Terminal("--url", stub.url, *args, **env))
        terminals[-1].expect("> ")
        return terminals[-1]

    yield open_
    for terminal in terminals:
        terminal.process.kill()
        terminal.process.wait()


@pytest.fixture
def piped(stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Piped:
    """Runs the command in this process with this on stdin; gives status, stdout and stderr."""
    monkeypatch.delenv("TPSERVE_API_KEY", raising=False)

    def run(question: str | bytes, *args: str) -> tuple[int, str, str]:
        data = question if isinstance(question, bytes) else question.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        monkeypatch.setattr(sys, "argv", ["tpserve", "chat", "--url", stub.url, *args])
        return cli.main(), *capsys.readouterr()

    return run


def test_talk_shows_answers_and_sends_all_that_was_said(stub: Stub, opened: Open) -> None:
    terminal = opened("--system", "Be kind.", "--temperature", "0", "--max-tokens", "9")
    assert "one at http://" in terminal.seen
    assert terminal.ask("What is naïve 你好 👩‍👩‍👧?").strip() == "Hello there."
    terminal.ask("   ")
    terminal.ask("And?")
    said = [("system", "Be kind."), ("user", "What is naïve 你好 👩‍👩‍👧?"), ("assistant", "Hello there."), ("user", "And?")]
    assert [(m["role"], m["content"]) for m in stub.bodies[-1]["messages"]] == said
    assert {name: stub.bodies[-1][name] for name in ("model", "temperature", "max_tokens", "stream")} == {
        "model": "one", "temperature": 0, "max_tokens": 9, "stream": True,
    }  # fmt: skip
    assert len(stub.bodies) == 2
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_lines_can_be_edited_and_called_back(stub: Stub, opened: Open) -> None:
    terminal = opened()
    terminal.ask("Say ü\x7fö")  # the whole letter goes
    terminal.ask(f"{UP}!")
    assert [body["messages"][-1]["content"] for body in stub.bodies] == ["Say ö", "Say ö!"]


def test_ctrl_c_stops_the_answer_and_keeps_what_came(stub: Stub, opened: Open) -> None:
    terminal = opened()
    stub.script = [delta(content="Once upon"), HOLD]
    terminal.type("A story\n")
    terminal.expect("Once upon")
    terminal.type(CTRL_C)
    terminal.expect("stopped")
    assert stub.hung_up.wait(LIMIT_S)
    terminal.expect("> ")
    stub.script = [HOLD]
    terminal.type("never mind\n")
    terminal.expect("never mind")
    while len(stub.bodies) < 2:
        time.sleep(0.01)
    terminal.type(CTRL_C)  # before anything came: this turn is not kept
    terminal.expect("> ")
    stub.script = [delta(content="more"), FINISH, DONE]
    terminal.ask("Go on")
    assert [m["content"] for m in stub.bodies[-1]["messages"]] == ["A story", "Once upon", "Go on"]


def test_ctrl_c_at_the_prompt_drops_the_line_alone(stub: Stub, opened: Open) -> None:
    terminal = opened()
    terminal.type("half a li")
    terminal.expect("half a li")  # a signal that comes before the line is waited for is not noticed before the next key
    terminal.type(CTRL_C)
    terminal.expect("> ")
    terminal.ask("whole")
    assert [body["messages"][-1]["content"] for body in stub.bodies] == ["whole"]
    terminal.type("/exit\n")
    assert terminal.end() == 0


def test_commands_do_what_help_says(stub: Stub, opened: Open, tmp_path: Path) -> None:
    terminal = opened()
    assert "/reset" in terminal.ask("/help")
    terminal.ask("first")
    terminal.ask("/system Be brief.")
    assert "saved" in terminal.ask(f"/save {tmp_path}/talk.json")
    assert "File exists" in terminal.ask(f"/save {tmp_path}/talk.json")
    assert "wants the name" in terminal.ask("/save")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [m["content"] for m in saved["messages"]] == ["Be brief.", "first", "Hello there."]
    terminal.ask("/reset")
    terminal.ask("/system")
    assert "no such command: /restart; /help lists them" in terminal.ask("/restart")
    terminal.ask(" /restart")
    assert [m["content"] for m in stub.bodies[-1]["messages"]] == [" /restart"]


@pytest.mark.parametrize(("env", "dim", "plain"), [({}, DIM, PLAIN), ({"NO_COLOR": "1"}, "", "")])
def test_reasoning_is_dimmed_where_there_are_colours(
    stub: Stub, opened: Open, env: dict[str, str], dim: str, plain: str
) -> None:
    stub.script = [delta(reasoning_content="Well,"), delta(content="\n\nYes."), FINISH, DONE]
    terminal = opened(**env)
    terminal.type("So?\n")
    terminal.expect(f"{dim}Well,{plain}\r\n\r\nYes.\r\n\r\n")
    terminal.expect("> ")
    terminal.ask("And?")
    assert [m["content"] for m in stub.bodies[-1]["messages"]] == ["So?", "\n\nYes.", "And?"]


def test_answer_that_ends_early_says_so_and_the_talk_goes_on(stub: Stub, opened: Open) -> None:
    terminal = opened()
    for ending, shown in (
        ([event(error("worker 1 died"))], "error: worker 1 died"),
        ([CUT, DONE], "cut: no more tokens"),
        ([], "error: the answer broke off"),
    ):
        stub.script = [delta(content="Hi"), *ending]
        assert f"Hi\n\n{shown}" in terminal.ask("hi")
    stub.refusal = (400, error("the prompt is too long"))
    assert "error: the prompt is too long" in terminal.ask("long")
    stub.refusal = None
    terminal.ask("short")
    assert [m["content"] for m in stub.bodies[-1]["messages"]] == ["hi", "Hi"] * 3 + ["short"]


def test_what_is_no_text_does_no_harm(stub: Stub, opened: Open) -> None:
    terminal = opened()
    os.write(terminal.master, b"\xff\xfe\n")
    terminal.expect("not UTF-8")
    terminal.expect("> ")
    assert stub.bodies == []
    stub.script = [delta(content="a\x1b[2Jb\x9bc\x07\td\n"), FINISH, DONE]
    terminal.type("?\n")
    terminal.expect("a[2Jbc")  # and no terminal cleared


def test_pipe_gets_the_answer_alone(stub: Stub) -> None:
    stub.script = [delta(reasoning_content="Hm."), delta(content="Grüße \x1b👩‍👩‍👧"), FINISH, DONE]
    command = [sys.executable, "-m", "tpserve.cli", "chat", "--url", stub.url, "--model", "two"]
    done = subprocess.run(command, input=b"two\nlines\n", capture_output=True, timeout=LIMIT_S, env=environment(), check=False)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "Grüße \x1b👩‍👩‍👧\n", b"")
    assert [(b["model"], b["messages"]) for b in stub.bodies] == [("two", [{"role": "user", "content": "two\nlines\n"}])]


@pytest.mark.parametrize(
    ("question", "args", "says"),
    [
        ("hi", ["--model", "three"], "the model three is not served"),
        ("hi", ["--url", "ftp://x"], "--url ftp://x: wants an address"),
        ("hi", ["--temperature", "warm"], "'--temperature': 'warm' is not a valid float"),
        ("hi", ["--tp", "2"], "No such option '--tp'"),
        ("", [], "stdin is empty"),
        (b"\xff", [], "not UTF-8"),
    ],
)
def test_mistake_is_one_line_and_status_2(piped: Piped, question: str | bytes, args: list[str], says: str) -> None:
    status, out, err = piped(question, *args)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("tpserve: error: ")
    assert says in line


def test_key_comes_from_the_environment(stub: Stub, piped: Piped, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.key = "secret"
    status, _, err = piped("hi")
    assert (status, len(err.splitlines())) == (2, 1)
    monkeypatch.setenv("TPSERVE_API_KEY", "secret")
    assert piped("hi") == (0, "Hello there.\n", "")


def test_answer_that_breaks_in_a_pipe_is_told_on_stderr(stub: Stub, piped: Piped) -> None:
    stub.script = [delta(content="Hi"), event(error("worker 1 died"))]
    assert piped("hi") == (2, "Hi\n", "tpserve: error: worker 1 died\n")


def test_answer_that_is_cut_in_a_pipe_is_told_on_stderr(stub: Stub, piped: Piped) -> None:
    stub.script = [delta(content="Hi"), CUT, DONE]
    assert piped("hi") == (0, "Hi\n", "tpserve: cut: no more tokens are allowed\n")


def test_answer_to_a_pipe_cannot_steer_the_terminal_that_shows_it(stub: Stub) -> None:
    stub.script = [delta(content="a\x1b[2Jb\tc"), FINISH, DONE]
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "tpserve.cli", "chat", "--url", stub.url]
    subprocess.run(command, input=b"hi", stdout=slave, timeout=LIMIT_S, env=environment(), check=True)
    os.close(slave)
    assert os.read(master, 4096).split(b"b")[0] == b"a[2J"
    os.close(master)


def test_refusal_cannot_steer_the_terminal(stub: Stub, piped: Piped) -> None:
    stub.refusal = (400, error("no\x1b[2J way"))
    assert piped("hi") == (2, "\n", "tpserve: error: no[2J way\n")
    stub.models = (200, {"data": [{"id": "a\x1bb"}]})
    assert piped("hi", "--model", "x")[2].endswith("served: ab\n")
