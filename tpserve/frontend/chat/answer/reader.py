"""Reading one call, `{"name": ..., "arguments": {...}}`, as its characters come."""

from __future__ import annotations

import json
from collections.abc import Container, Generator

_SPACE = " \t\n\r"
_ARGUMENTS = ("arguments", "parameters")
# What JSON has outside of strings.
_PLAIN = frozenset("{}[],:+-.0123456789" + _SPACE + "abcdefghijklmnopqrstuvwxyzEINS")

_Steps = Generator[None, str, str]  # takes characters, returns text


class Malformed(Exception):
    """The character is none that a call may have there."""


class CallReader:
    """Takes characters until the call is complete.

    It is a call once its name is known, is one of `names`, and the object of its arguments has begun, in whatever
    order; other keys may stand beside them. Arguments are taken as the model wrote them: only strings and brackets are
    followed, to find their end.
    """

    def __init__(self, names: Container[str]):
        self._names = names
        self._name: str | None = None
        self._arguments: list[str] = []
        self._has_arguments = False
        self.is_complete = False
        self._steps = self._call()
        next(self._steps)

    @property
    def name(self) -> str | None:
        """The function's name, once it is certain that this is a call."""
        return self._name if self._has_arguments else None

    def feed(self, char: str) -> None:
        """Take the next character; not after it is complete. Raises Malformed, after which it takes no more."""
        try:
            self._steps.send(char)
        except StopIteration:
            self.is_complete = True
        except (ValueError, RecursionError):  # of json.loads
            raise Malformed from None

    def take(self) -> str:
        """The text of the arguments that came since the last call of this."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _call(self) -> _Steps:
        """The object. Each part is given its first character, and returns the first one behind it."""
        char = yield from self._visible()
        _expect(char == "{")
        while char != "}":
            char = yield from self._visible()
            key, char = yield from self._string(char)
            _expect(char == ":")
            char = yield from self._visible()
            if key == "name":
                _expect(self._name is None)
                self._name, char = yield from self._string(char)
                _expect(self._name in self._names)
            elif key in _ARGUMENTS:
                _expect(char == "{" and not self._has_arguments)
                char = yield from self._object_of_arguments()
            else:
                char = yield from self._other(char)
            _expect(char in ",}")
        _expect(self.name is not None)
        return ""

    def _visible(self) -> _Steps:
        """The next character that is no white space."""
        char = _SPACE
        while char in _SPACE:
            char = yield
        return char

    def _string(self, char: str) -> Generator[None, str, tuple[str, str]]:
        """A string's value, and the first visible character behind it."""
        _expect(char == '"')
        text = yield from self._quoted()
        value: str = json.loads(text)
        return value, (yield from self._visible())

    def _quoted(self) -> _Steps:
        """The text of a string whose first quote has come."""
        text, char, escaped = ['"'], "", False
        while char != '"' or escaped:
            escaped = char == "\\" and not escaped
            char = yield
            text.append(char)
        return "".join(text)

    def _object_of_arguments(self) -> _Steps:
        self._has_arguments = True
        self._arguments.append("{")
        depth, quoted, escaped = 1, False, False
        while depth:
            char = yield
            _expect(quoted or char == '"' or char in _PLAIN)
            self._arguments.append(char)
            if char == '"' and not escaped:
                quoted = not quoted
            escaped = quoted and char == "\\" and not escaped
            if not quoted:
                depth += (char in "{[") - (char in "}]")
        return (yield from self._visible())

    def _other(self, char: str) -> _Steps:
        """A value that says nothing to us; only that it is JSON counts."""
        text: list[str] = []
        depth = 0
        while depth or char not in ",}" + _SPACE:
            text.append((yield from self._quoted()) if char == '"' else char)
            depth += (char in "{[") - (char in "}]")
            char = yield
        json.loads("".join(text))
        return (yield from self._visible()) if char in _SPACE else char


def _expect(met: bool) -> None:
    if not met:
        raise Malformed
