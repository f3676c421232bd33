"""What is made once in the cache folder, and a cache that cannot be written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tpserve.checkpoint.cache import key, make_once, superseded
from tpserve.settings import UserError


def written(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_key_follows_place_size_time_and_version(tmp_path: Path) -> None:
    file, other = written(tmp_path / "file"), written(tmp_path / "sub" / "file")
    first = key(1, [file])
    assert key(1, [file]) == first
    place = first.split("-")[0]
    assert key(1, [other]).split("-")[0] != place
    assert key(2, [file]).startswith(f"{place}-")
    assert key(2, [file]) != first
    os.utime(file, ns=(1, 1))
    assert key(1, [file]).startswith(f"{place}-")
    assert key(1, [file]) != first


def test_superseded_are_the_folders_of_other_states_of_the_same_files(tmp_path: Path) -> None:
    file = written(tmp_path / "file")
    names = [f"m-{key(version, [file])}" for version in (1, 2)]
    for name in (*names, f"other-{key(1, [file])}", f"{names[0]}.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / f"{names[0]}.lock").touch()
    assert superseded(tmp_path / names[1]) == [tmp_path / names[0]]


@pytest.mark.parametrize("cache", ["file/cache", "/proc/no/such"])
def test_cache_that_cannot_be_written_is_refused_with_the_remedy(tmp_path: Path, cache: str) -> None:
    written(tmp_path / "file")
    with pytest.raises(UserError, match=r"^cannot write the cache /.*: .*; set TPSERVE_CACHE to a folder that can be written$"):
        make_once(tmp_path / cache / "made", lambda folder: None, "it")


def test_disk_that_is_full_is_refused_with_the_remedy_and_leaves_nothing(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        written(folder / "half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=f"^cannot write the cache {tmp_path}: No space left on device; set TPSERVE_CACHE"):
        make_once(tmp_path / "made", full, "it")
    assert [path.name for path in tmp_path.iterdir()] == ["made.lock"]


def test_rest_of_a_run_that_was_killed_is_removed(tmp_path: Path) -> None:
    written(tmp_path / "made.partial" / "half")
    made = make_once(tmp_path / "made", lambda folder: shutil.copy(__file__, folder / "whole"), "it")  # type: ignore[arg-type,func-returns-value]
    assert [path.name for path in made.iterdir()] == ["whole"]
