"""API keys: who may use the server, and how urgently. What is kept of a key is its digest."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

from tpserve.deployment import ApiKey
from tpserve.settings import Settings, UserError

_FORM = "wants KEY NAME PRIORITY MAX_WAIT_S"
_MOST_PRIORITY = 2**31  # as `Submit` has it


def digest(key: str) -> str:
    """What stands for the key: its SHA-256, in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def load(settings: Settings) -> tuple[ApiKey, ...]:
    """All keys that the settings give; none if any client may connect. Raises UserError with file and line."""
    keys = tuple(ApiKey(digest=digest(key), name="default", priority=0, max_wait_s=0.0) for key in settings.api_key)
    return keys if settings.api_key_file is None else (*keys, *_read(settings.api_key_file))


def is_open_to_others(settings: Settings) -> bool:
    """Whether other users of this machine can read the key file."""
    return settings.api_key_file is not None and bool(_path(settings.api_key_file).stat().st_mode & 0o044)


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))


def _read(name: str) -> Iterator[ApiKey]:
    named = f"--api-key-file {name}"
    try:
        text = _path(name).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{named}: {error.strerror}; give a file of lines KEY NAME PRIORITY MAX_WAIT_S") from None
    except UnicodeDecodeError:
        raise UserError(f"{named}: not UTF-8 text") from None
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        where = f"{named}, line {number}"
        key = _key(fields, where)
        if key.digest in lines:
            raise UserError(f"{where}: the key stands in line {lines[key.digest]} already")
        lines[key.digest] = number
        yield key
    if not lines:
        raise UserError(f"{named}: holds no key; write lines KEY NAME PRIORITY MAX_WAIT_S")


def _key(fields: list[str], where: str) -> ApiKey:
    """Nothing of the line is repeated but what is surely no key."""
    if len(fields) != 4:
        raise UserError(f"{where}: {_FORM}, not {len(fields)} words")
    key, name, priority, max_wait = fields
    if not (key.isascii() and key.isprintable() and name.isprintable()):
        raise UserError(f"{where}: key and name: printable characters only, and a key's are ASCII")
    try:
        urgency, wait_s = int(priority), float(max_wait)
    except ValueError:
        raise UserError(f"{where}: {_FORM}: the last two are numbers, such as 0 30") from None
    if not -_MOST_PRIORITY <= urgency < _MOST_PRIORITY:
        raise UserError(f"{where}: the priority must be from {-_MOST_PRIORITY} to {_MOST_PRIORITY - 1}")
    if not 0 <= wait_s < math.inf:
        raise UserError(f"{where}: the longest wait must be seconds, or 0 for no limit of its own")
    return ApiKey(digest=digest(key), name=name, priority=urgency, max_wait_s=wait_s)
