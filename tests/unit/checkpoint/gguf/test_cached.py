"""`--model FILE.gguf`: converted once into the cache, in a child, complete or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.unit.checkpoint.gguf import files
from tpserve.checkpoint import gguf, source
from tpserve.settings import Settings, UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("TPSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The converter replaced by one that writes a file; the arguments that it was given."""
    seen: list[list[str]] = []

    def run(module: str, *arguments: str) -> None:
        assert module == "tpserve.checkpoint.gguf"
        (Path(arguments[-2]) / "weights").write_text("w")
        seen.append(list(arguments))

    monkeypatch.setattr(gguf, "run_module", run)
    return seen


@pytest.mark.slow
def test_model_is_converted_once_and_served_under_its_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = files.write(tmp_path / "Tiny-Q8.gguf")
    found = source.describe(Settings(model=str(path)))
    assert found.name == "Tiny-Q8"
    assert found.path == found.tokenizer
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in found.path.iterdir()
    }
    assert capfd.readouterr() == ("", f"converting {path} into {found.path}\n")
    monkeypatch.setattr(gguf, "run_module", None)  # must not be needed again
    assert source.describe(Settings(model=str(path))) == found


@pytest.mark.slow
def test_refusal_of_the_converter_is_one_line_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = files.write(tmp_path / "x.gguf", general__architecture="phi3")
    with pytest.raises(UserError, match=f"^{path}: GGUF architecture 'phi3' is not supported; those that are: .*$"):
        gguf.converted(path)
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


def test_changed_file_is_converted_anew_and_a_link_is_not(tmp_path: Path, runs: list[list[str]]) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("one")
    first = gguf.converted(path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.gguf").symlink_to(path)
    assert gguf.converted(tmp_path / "sub" / "x.gguf") == first
    assert len(runs) == 1
    os.utime(path, ns=(1, 1))
    second = gguf.converted(path)
    path.write_text("other")
    os.utime(path, ns=(1, 1))
    assert len({first, second, gguf.converted(path)}) == 3
    assert len(runs) == 3


def test_servers_at_once_convert_a_file_once(tmp_path: Path, runs: list[list[str]]) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("one")
    start = threading.Barrier(4)
    found: list[Path] = []

    def serve() -> None:
        start.wait(10)
        found.append(gguf.converted(path))

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 4
    assert len(set(found)) == len(runs) == 1


@pytest.mark.parametrize("given", [1, 3])
def test_any_part_of_a_split_file_stands_for_all(tmp_path: Path, runs: list[list[str]], given: int) -> None:
    parts = [tmp_path / f"big-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.write_text("x")
    gguf.converted(parts[given - 1])
    assert runs[0][:-2] == [str(part) for part in parts]
    assert gguf.model_name(parts[0]) == "big"


def test_file_or_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--model {tmp_path}/x.gguf: there is no file {tmp_path}/x.gguf"):
        gguf.converted(tmp_path / "x.gguf")
    part = tmp_path / "big-00002-of-00002.gguf"
    part.write_text("x")
    with pytest.raises(UserError, match=r"there is no file .*/big-00001-of-00002\.gguf"):
        gguf.converted(part)


def test_folder_with_the_ending_of_a_file_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").mkdir()
    assert source.describe(Settings(model=str(tmp_path / "x.gguf"))).path == tmp_path / "x.gguf"


@pytest.mark.slow
def test_converter_whose_parent_has_died_writes_nothing(tmp_path: Path) -> None:
    path = files.write(tmp_path / "x.gguf")
    folder = tmp_path / "model"
    folder.mkdir()
    command = [sys.executable, "-m", "tpserve.checkpoint.gguf", str(path), str(folder), str(2**22 + 1)]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (1, b"", b"")
    assert not any(folder.iterdir())
