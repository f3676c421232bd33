"""`--model FILE.gguf`: converted once into the cache, in a child and in two stages, each complete or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.checkpoint.gguf import files
from tpserve.checkpoint import gguf, source
from tpserve.preflight import resolve
from tpserve.settings import Settings, UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("TPSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The converter replaced by one that writes a file; the stages and files that it was given."""
    seen: list[list[str]] = []

    def run(module: str, *arguments: str | Path) -> None:
        assert module == "tpserve.checkpoint.gguf"
        (Path(arguments[-1]) / "made").write_text("x")
        seen.append([str(argument) for argument in arguments[:-1]])

    monkeypatch.setattr(gguf, "run_converter", run)
    return seen


def both(path: Path) -> tuple[Path, Path]:
    """Both stages; the folders of description and weights."""
    folder, fetch_weights = gguf.describe(path)
    return folder, fetch_weights()


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if file.suffix != ".lock"}


@pytest.mark.slow
def test_model_is_converted_once_and_served_under_its_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = files.write(tmp_path / "Tiny-Q8.gguf")
    found = source.describe(Settings(model=str(path)))
    assert (found.name, found.tokenizer) == ("Tiny-Q8", found.path)
    described = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names(found.path) == described
    assert capfd.readouterr() == ("", "")
    weights = found.fetch_weights()
    assert names(weights) == {"model.safetensors"}
    assert capfd.readouterr() == ("", f"converting {path} into {found.path}\n")
    monkeypatch.setattr(gguf, "run_converter", None)  # must not be needed again
    assert both(path) == (found.path, weights)
    assert resolve(Settings(model=str(path), device="cpu", kv_cache_memory="1MiB")).model_path == str(weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (dict(tp=1000), "sizes that work"),
        (dict(max_model_len=1000), "the model was made for 128 positions"),
        (dict(kv_cache_memory=1), "less than one page"),
        (dict(kv_cache_dtype="float16"), "the model's float32"),
    ],
)
def test_what_cannot_be_served_is_refused_before_weights_are_converted(
    tmp_path: Path, cache: Path, flags: dict[str, object], named: str
) -> None:
    path = files.write(tmp_path / "x.gguf")
    with pytest.raises(UserError, match=named):
        resolve(Settings.model_validate({"model": str(path), "device": "cpu", **flags}))
    (folder,) = (file for file in cache.iterdir() if file.is_dir())
    assert "config.json" in names(folder)
    assert not (folder / "weights").exists()


@pytest.mark.slow
def test_dummy_weights_convert_none(tmp_path: Path) -> None:
    path = files.write(tmp_path / "x.gguf")
    deployment = resolve(Settings(model=str(path), device="cpu", load_format="dummy", kv_cache_memory="1MiB"))
    assert deployment.dtype == "float32"
    assert "weights" not in names(Path(deployment.model_path))


@pytest.mark.slow
def test_refusal_of_the_converter_is_one_line_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = files.write(tmp_path / "x.gguf", general__architecture="phi3")
    with pytest.raises(UserError, match=f"^{path}: GGUF architecture 'phi3' is not supported; those that are: .*$"):
        gguf.describe(path)
    assert not names(cache)


def test_changed_file_is_converted_anew_and_a_link_is_not(tmp_path: Path, runs: list[list[str]]) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("one")
    first = both(path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.gguf").symlink_to(path)
    assert both(tmp_path / "sub" / "x.gguf") == first
    assert [run[0] for run in runs] == ["description", "weights"]
    os.utime(path, ns=(1, 1))
    second = both(path)
    path.write_text("other")
    os.utime(path, ns=(1, 1))
    assert len({first, second, both(path)}) == 3
    assert len(runs) == 6


def test_folders_of_earlier_states_of_the_file_are_named_when_a_new_one_is_made(
    tmp_path: Path, runs: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = tmp_path / "x.gguf", tmp_path / "sub" / "x.gguf"
    other.parent.mkdir()
    for file in (path, other):
        file.write_text("one")
        both(file)
    first, _ = both(path)
    capsys.readouterr()
    os.utime(path, ns=(1, 1))
    both(path)
    assert capsys.readouterr().err == f"{first} is of an earlier {path}; remove it if no server needs it any more\n"
    both(path)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stage", [gguf.describe, both])
def test_servers_at_once_convert_a_file_once(
    tmp_path: Path, runs: list[list[str]], stage: Callable[[Path], tuple[Path, object]]
) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("one")
    start = threading.Barrier(4)
    found: list[Path] = []

    def serve() -> None:
        start.wait(10)
        found.append(stage(path)[0])

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(runs) == (1 if stage is gguf.describe else 2)


@pytest.mark.parametrize("given", [1, 3])
def test_any_part_of_a_split_file_stands_for_all(tmp_path: Path, runs: list[list[str]], given: int) -> None:
    parts = [tmp_path / f"big-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.write_text("x")
    both(parts[given - 1])
    assert runs == [[stage, *map(str, parts)] for stage in ("description", "weights")]
    assert gguf.model_name(parts[0]) == "big"


def test_file_or_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--model {tmp_path}/x.gguf: there is no file {tmp_path}/x.gguf"):
        gguf.describe(tmp_path / "x.gguf")
    part = tmp_path / "big-00002-of-00002.gguf"
    part.write_text("x")
    with pytest.raises(UserError, match=r"there is no file .*/big-00001-of-00002\.gguf"):
        gguf.describe(part)


def test_folder_with_the_ending_of_a_file_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").mkdir()
    assert source.describe(Settings(model=str(tmp_path / "x.gguf"))).path == tmp_path / "x.gguf"


@pytest.mark.slow
def test_converter_whose_parent_has_died_writes_nothing(tmp_path: Path) -> None:
    path = files.write(tmp_path / "x.gguf")
    folder = tmp_path / "model"
    folder.mkdir()
    command = [sys.executable, "-m", "tpserve.checkpoint.gguf", "description", str(path), str(folder), str(2**22 + 1)]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (1, b"", b"")
    assert not any(folder.iterdir())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("m-00001-of-00000.gguf", "m-00001-of-00000"),
        ("m-00002-of-00001.gguf", "m-00002-of-00001"),
        ("m-00000-of-00002.gguf", "m-00000-of-00002"),
        ("m-00002-of-00002.gguf", "m"),
    ],
)
def test_number_that_is_no_part_belongs_to_the_name(name: str, expected: str) -> None:
    assert gguf.model_name(Path(name)) == expected


@pytest.mark.parametrize("name", ["n" * 240, "é" * 124])
def test_file_with_a_long_name_has_a_folder_all_the_same(tmp_path: Path, runs: list[list[str]], name: str) -> None:
    path = tmp_path / f"{name}.gguf"
    path.write_text("one")
    described, _ = both(path)
    assert described.is_dir()
