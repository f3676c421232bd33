"""Reading a GGUF file, and in one line why one cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.gguf import files
from tpserve.checkpoint.gguf.file import read
from tpserve.settings import UserError


def refusal(path: Path) -> str:
    """What is said of the file: one line that begins with its path."""
    with pytest.raises(UserError) as caught:
        read([path])
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text


def test_float_is_the_number_that_was_meant(tmp_path: Path) -> None:
    metadata = read([files.write(tmp_path / "x.gguf")]).metadata
    assert metadata.number("attention.layer_norm_rms_epsilon") == 1e-5
    assert metadata.size("attention.head_count") == files.HEADS


@pytest.mark.parametrize("content", [b"", b"GG", b"ggjt\x03\0\0\0", b"<!DOCTYPE html>", b"version https://git-lfs"])
def test_other_file_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    assert "is no GGUF file" in refusal(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("version", "text"), [(b"\0\0\0\x03", "big-endian"), (b"\x01\0\0\0", "GGUF version 1; supported: 2, 3")]
)
def test_other_version_is_refused_by_name(tmp_path: Path, version: bytes, text: str) -> None:
    path = files.write(tmp_path / "x.gguf")
    path.write_bytes(b"GGUF" + version + path.read_bytes()[8:])
    assert text in refusal(path)


def test_truncated_file_is_incomplete_wherever_it_ends(tmp_path: Path) -> None:
    content = files.write(tmp_path / "x.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(8, 1600, 37), len(content) // 2, len(content) - 64]:
        cut.write_bytes(content[:length])
        assert "is incomplete or damaged" in refusal(cut)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(general__type="adapter"), "is an adapter"),
        (dict(general__type="mmproj", general__architecture="clip"), "image part"),
        (dict(general__type="imatrix"), "holds 'imatrix', not a model"),
        (dict(split__count=3), "is one of 3 files"),
    ],
)
def test_what_is_no_whole_model_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    assert text in refusal(files.write(tmp_path / "x.gguf", **changes))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = files.write(tmp_path / "x.gguf", general__name="an odd name")
    path.write_bytes(path.read_bytes().replace(b"an odd name", b"an \xff\xff\xff name"))
    assert "is incomplete or damaged ('utf-8' codec can't decode" in refusal(path)
