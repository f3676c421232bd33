"""What `--model` may be, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpserve.checkpoint import source
from tpserve.settings import Settings, UserError


def describe(model: str) -> source.Source:
    return source.describe(Settings(model=model))


def test_folder_is_found_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = describe(".")
    assert (found.path, found.tokenizer, found.name) == (tmp_path, tmp_path, tmp_path.name)


def test_link_to_a_folder_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert describe(str(tmp_path / "link")).name == "link"


def test_demo_that_is_there_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "demo_path", lambda: tmp_path)
    assert (describe("demo").path, describe("demo").name) == (tmp_path, "demo")


def test_demo_that_is_not_there_says_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "demo_path", lambda: tmp_path / "none")
    with pytest.raises(UserError, match="run scripts/setup"):
        describe("demo")


def test_what_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    cases = {
        str(tmp_path / "none"): "no such folder",
        str(tmp_path / "text"): "is a file",
    }
    for model, reason in cases.items():
        with pytest.raises(UserError, match=f"^--model {model}: .*{reason}"):
            describe(model)
