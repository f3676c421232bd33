"""What a GGUF file says of its model in keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpserve.settings import UserError


@dataclass(frozen=True)
class Metadata:
    """A file's keys, read only. Values are Python's own: str, int, float, bool and lists of these."""

    file: str  # its path, for messages
    values: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """The format's name of the kind of model, such as llama; it begins the names of the model's own keys."""
        return str(self.require("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value, or the default where the file has no such key."""
        return self.values.get(key, default)

    def require(self, key: str) -> Any:
        """The key's value. Raises UserError where the file has no such key."""
        if key not in self.values:
            raise UserError(f"{self.file}: has no {key}, without which the model cannot be read; download or convert it again")
        return self.values[key]

    def of_model(self, key: str, default: Any = None) -> Any:
        """The value of one of the model's own keys, named without the architecture: rope.scaling.type."""
        return self.get(f"{self.architecture}.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        """One of the model's own keys that is a whole number, at least 1. Raises UserError if it is not."""
        value = self._of_model(key, default)
        if type(value) is not int or value < 1:
            raise UserError(f"{self.file}: {self.architecture}.{key} is {_short(value)}; only one number above 0 is supported")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """One of the model's own keys that is a number above 0. Raises UserError if it is not."""
        value = self._of_model(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise UserError(f"{self.file}: {self.architecture}.{key} is {_short(value)}; only a number above 0 is supported")
        return float(value)

    def _of_model(self, key: str, default: Any) -> Any:
        return self.require(f"{self.architecture}.{key}") if default is None else self.of_model(key, default)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}…"
