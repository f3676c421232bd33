"""The keywords of `LLM(...)`: settings by any of their names, and those of other engines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tpserve import sources, spellings
from tpserve.offline.plain import plain
from tpserve.settings import Settings
from tpserve.sources import Given

_OF_A_SERVER = {
    "host", "port", "allow_no_key", "api_key", "api_key_file", "allowed_origins", "strict", "max_queue", "queue_timeout",
}  # fmt: skip
_KNOWN = spellings.FIELDS.keys() - _OF_A_SERVER


def to_settings(keywords: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """The settings, and what there is to tell of keywords without effect. None is as if it were not given.

    Raises TypeError for what is no keyword, UserError for a value that is wrong or not supported yet.
    """
    given: dict[str, Given] = {}
    notes: list[str] = []
    keywords = {name: _plain(value) for name, value in keywords.items() if value is not None}
    for name, value in keywords.items():
        if name in _KNOWN:
            field = spellings.FIELDS[name]
            if field in given:
                raise TypeError(f"{given[field].source} and {name} are the same setting: give one of them")
            given[field] = Given(_spelled(field, value), name, f"{name}={value!r}")
        elif spellings.is_foreign(name):
            notes += filter(None, [spellings.foreign_note(name, value, keywords.get("model"))])
        elif name in _OF_A_SERVER:
            raise TypeError(f"LLM() has no keyword {name}: it does not serve over HTTP")
        else:
            raise TypeError(f"LLM(): {spellings.unknown(name, _KNOWN)}")
    return sources.check({"log_level": Given("warning", "", ""), **given}), notes


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else plain(value)


def _spelled(field: str, value: Any) -> Any:
    """torch's dtypes and single names as `Settings` has them."""
    if field == "dtype":
        return str(value).removeprefix("torch.")
    return (value,) if sources.takes_several(field) and isinstance(value, str) else value
