from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tpserve.kernels.native import build as building
from tpserve.kernels.native import library as loading
from tpserve.kernels.native.library import Library, NotBuilt


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_library_where_there_is_a_compiler_is_built_of_these_sources() -> None:
    assert building.built_of(building.FOLDER / building.LIBRARY) == building.source_digest()
    assert Library().name in ("plain", "avx2", "avx512", "amx")
    assert Library("plain").name == "plain"


def test_library_without_the_file_says_how_to_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "FOLDER", tmp_path)
    with pytest.raises(NotBuilt, match="were not built; run python -m tpserve"):
        Library()


def test_library_built_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "source_digest", lambda: "other")
    with pytest.raises(NotBuilt, match="were built of other sources"):
        Library()


def test_level_that_no_machine_has_is_refused() -> None:
    with pytest.raises(NotBuilt, match="this machine has no avx1024"):
        Library("avx1024")


def test_build_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(building.BuildError, match="no C\\+\\+ compiler"):
        building.build(tmp_path / "x.so")


def test_build_with_a_broken_compiler_shows_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho no good >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(building.BuildError, match="no good"):
        building.build(tmp_path / "x.so")
