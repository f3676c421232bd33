"""Files of API keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpserve import keys
from tpserve.settings import Settings, UserError

FILE = """\
# who            urgency, longest wait
sk-a Alice -5 30

sk-b bob 10 0.5
"""


def settings(folder: Path, text: str | bytes, **more: object) -> Settings:
    file = folder / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(0o600)
    return Settings.model_validate({"api_key_file": str(file), **more})


def test_file_names_each_key_with_its_priority_and_wait(tmp_path: Path) -> None:
    found = keys.load(settings(tmp_path, FILE))
    assert [(key.name, key.priority, key.max_wait_s) for key in found] == [("Alice", -5, 30.0), ("bob", 10, 0.5)]
    assert [key.digest for key in found] == [keys.digest("sk-a"), keys.digest("sk-b")]


def test_keys_of_the_command_line_come_beside_those_of_the_file(tmp_path: Path) -> None:
    found = keys.load(settings(tmp_path, FILE, api_key=("x",)))
    assert [(key.name, key.priority) for key in found] == [("default", 0), ("Alice", -5), ("bob", 10)]
    assert keys.load(Settings()) == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no key; write lines KEY NAME PRIORITY MAX_WAIT_S"),
        ("# only\n", "holds no key"),
        ("sk-secret bob 1", "line 1: wants KEY NAME PRIORITY MAX_WAIT_S, not 3 words"),
        ("\nsk-secret bob 1 2 3", "line 2: wants KEY NAME PRIORITY MAX_WAIT_S, not 5 words"),
        ("sk-secret bob high 30", "line 1: wants KEY NAME PRIORITY MAX_WAIT_S: the last two are numbers"),
        ("sk-secret bob 1 soon", "the last two are numbers"),
        ("bob 1 30 sk-secret", "the last two are numbers"),
        ("sk-secret bob 4000000000 30", "line 1: the priority must be from -2147483648 to 2147483647"),
        ("sk-secret bob 1 -1", "line 1: the longest wait must be seconds, or 0"),
        ("sk-secret bob 1 nan", "line 1: the longest wait must be seconds, or 0"),
        ("sk-secret bob 1 inf", "line 1: the longest wait must be seconds, or 0"),
        ("sk-secrét bob 1 1", "line 1: key and name: printable characters only, and a key's are ASCII"),
        ("sk-secret b\x1bob 1 1", "line 1: key and name: printable characters only"),
        ("sk-secret a 1 1\nsk-secret b 1 1", "line 2: the key stands in line 1 already"),
        (b"sk-secret \xff 1 1", "not UTF-8 text"),
    ],
)
def test_wrong_line_is_refused_with_its_place_and_without_the_key(tmp_path: Path, text: str | bytes, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        keys.load(settings(tmp_path, text))
    assert str(refusal.value).startswith(f"--api-key-file {tmp_path}/keys")
    assert says in str(refusal.value)
    assert "secr" not in str(refusal.value)


def test_missing_file_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="--api-key-file no/such: No such file or directory"):
        keys.load(Settings(api_key_file="no/such"))


@pytest.mark.parametrize(("mode", "expected"), [(0o600, False), (0o640, True), (0o604, True)])
def test_file_that_others_can_read_is_known(tmp_path: Path, mode: int, expected: bool) -> None:
    given = settings(tmp_path, FILE)
    (tmp_path / "keys").chmod(mode)
    assert keys.is_open_to_others(given) is expected
    assert not keys.is_open_to_others(Settings())
