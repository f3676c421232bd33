"""The terminal's side: the user's lines go in, answers come out as they are made."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO

from tpserve.chat.conversation import Conversation, said
from tpserve.chat.server import AnswerError, Piece, Server, harmless
from tpserve.settings import UserError

_HELP = """\
/reset        forget what was said so far
/system TEXT  set the system message; without TEXT there is none
/save FILE    write the conversation to a new file, as the body of a request
/exit         end, as Ctrl-D does
Ctrl-C stops an answer; what came of it is kept. A line that begins with / is sent if a space stands before it."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_CUT = "cut: no more tokens are allowed"


def talk(server: Server, conversation: Conversation) -> int:
    """Talk until the user ends it; where stdin is no terminal, answer what it holds. Returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show all of Unicode
    stdin = sys.stdin or io.StringIO()
    if not stdin.isatty():
        return _answer_all(server, conversation, stdin)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then has editing and the lines before)
    return _Talk(server, conversation).run()


def _answer_all(server: Server, conversation: Conversation, stdin: TextIO) -> int:
    """Print the answer to all of stdin, and nothing else; to a file or a pipe as it is, to a terminal without what would
    steer it.
    """
    try:
        question = stdin.read()
        question.encode()
    except UnicodeError:
        raise UserError("what comes on stdin is not UTF-8") from None
    if not question.strip():
        raise UserError("stdin is empty: write the question to it, or run tpserve chat in a terminal")
    is_shown, is_cut = sys.stdout.isatty(), False
    try:
        for piece in server.answer(conversation.body(said("user", question))):
            print(harmless(piece.text) if is_shown else piece.text, end="", flush=True)
            is_cut = is_cut or piece.finish_reason == "length"
    except AnswerError as error:
        raise UserError(str(error)) from None
    finally:
        print()
    if is_cut:
        print(f"tpserve: {_CUT}", file=sys.stderr)
    return 0


class _Talk:
    """Lines with a slash in front are commands, all others questions."""

    def __init__(self, server: Server, conversation: Conversation):
        self._server = server
        self._conversation = conversation
        self._screen = _Screen(sys.stdout)

    def run(self) -> int:
        self._screen.note(f"{self._conversation.model} at {self._server.url}; Ctrl-D ends, /help lists the commands")
        going_on = True
        while going_on:
            try:
                going_on = self._take(input("> "))
            except KeyboardInterrupt:
                self._screen.note("")
            except EOFError:
                self._screen.note("")
                going_on = False
            except UnicodeError:
                self._screen.note("that line is not UTF-8; it was not sent")
        return 0

    def _take(self, line: str) -> bool:
        """Obey or ask. Returns whether the talk goes on."""
        if line.startswith("/"):
            return self._obey(*line.partition(" ")[::2])
        line.encode()  # what is no text cannot be sent
        if line.strip():
            self._ask(line)
        return True

    def _obey(self, command: str, argument: str) -> bool:
        conversation, note = self._conversation, self._screen.note
        match command:
            case "/exit" | "/quit":
                return False
            case "/help":
                note(_HELP)
            case "/reset":
                conversation.turns.clear()
                note("the conversation begins anew")
            case "/system":
                conversation.system = argument.strip()
                note("the system message is set" if conversation.system else "there is no system message now")
            case "/save":
                note(_save(conversation, argument.strip()))
            case _:
                note(f"no such command: {command}; /help lists them")
        return True

    def _ask(self, question: str) -> None:
        """Show the answer as it comes. The turn is kept if any text of the answer came."""
        answer, ending = "", ""
        try:
            with contextlib.closing(self._server.answer(self._conversation.body(said("user", question)))) as pieces:
                for piece in pieces:
                    answer += piece.text
                    self._screen.show(piece)
                    ending = _CUT if piece.finish_reason == "length" else ending
        except KeyboardInterrupt:
            ending = "stopped"
        except AnswerError as error:
            ending = f"error: {error}"
        self._screen.end_answer()
        if ending:
            self._screen.note(ending)
        if answer:
            self._conversation.turns.append((question, answer))


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        return "/save wants the name of a file"
    try:
        conversation.save(name)
    except OSError as error:
        return f"/save {name}: {error.strerror or error}"
    return f"saved as {name}"


class _Screen:
    """Standard output of a talk. Answers cannot steer the terminal: their control characters are dropped."""

    def __init__(self, out: TextIO):
        self._out = out
        has_colours = out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._dim, self._plain = (_DIM, _PLAIN) if has_colours else ("", "")
        self._reasons = False  # whether what was shown last is reasoning

    def show(self, piece: Piece) -> None:
        """More of an answer."""
        if piece.reasoning:
            self._write(self._dim + harmless(piece.reasoning) + self._plain)
            self._reasons = True
        if piece.text:
            text = "\n\n" + piece.text.lstrip("\n") if self._reasons else piece.text
            self._write(harmless(text))
            self._reasons = False

    def end_answer(self) -> None:
        """Leave a blank line below the answer."""
        self._write("\n\n")
        self._reasons = False

    def note(self, text: str) -> None:
        """A line that is not the model's."""
        self._write(self._dim + harmless(text) + self._plain + "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
