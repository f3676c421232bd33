"""What a GGUF file says of its model in keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tpserve.settings import UserError

_T = TypeVar("_T")
_D = TypeVar("_D")
_AGAIN = "download or convert it again"
_LARGEST = 2**31 - 1  # of a size; no model comes near it


@dataclass(frozen=True)
class Metadata:
    """A file's keys, read only. Values are Python's own: str, int, float, bool and lists of these."""

    file: str  # its path, for messages
    values: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """The format's name of the kind of model, such as llama; it begins the names of the model's own keys."""
        return str(self.require("general.architecture"))

    def get(self, key: str, kind: type[_T], default: _D) -> _T | _D:
        """The key's value, or the default where the file has no such key. Raises UserError for a value of another type."""
        if key not in self.values:
            return default
        value = self.values[key]
        if type(value) is not kind:
            raise UserError(f"{self.file}: {key} is {_short(value)}, which is no {kind.__name__}; {_AGAIN}")
        return value

    def list_of(self, key: str, kind: type[_T]) -> list[_T]:
        """The key's values, all of this type. Raises UserError if they are not, or the file has no such key."""
        values = self.require(key)
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise UserError(f"{self.file}: {key} is no list of {kind.__name__}; {_AGAIN}")
        return values

    def require(self, key: str) -> Any:
        """The key's value. Raises UserError where the file has no such key."""
        if key not in self.values:
            raise UserError(f"{self.file}: has no {key}, without which the model cannot be read; {_AGAIN}")
        return self.values[key]

    def of_model(self, key: str, kind: type[_T], default: _D) -> _T | _D:
        """As `get`, of one of the model's own keys, named without the architecture: rope.scaling.type."""
        return self.get(f"{self.architecture}.{key}", kind, default)

    def size(self, key: str, default: int | None = None) -> int:
        """One of the model's own keys that is a whole number above 0. Raises UserError if it is not."""
        value = self._of_model(key, default)
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise UserError(
                f"{self.file}: {self.architecture}.{key} is {_short(value)}; only one number from 1 to {_LARGEST} is supported"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """One of the model's own keys that is a number above 0. Raises UserError if it is not."""
        value = self._of_model(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise UserError(f"{self.file}: {self.architecture}.{key} is {_short(value)}; only a number above 0 is supported")
        return float(value)

    def _of_model(self, key: str, default: Any) -> Any:
        name = f"{self.architecture}.{key}"
        return self.require(name) if default is None else self.values.get(name, default)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}…"
