"""The shape of the source tree: its folders, the size of modules, what ARCHITECTURE.md says of it, what no file says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"tpserve", "launcher", "configs", "tests", "scripts"}
LONGEST_MODULE = 400  # lines
# Where a file was written, and what was said there, is of no use to its reader.
PRIVATE = re.compile(r"(?<![\w.-])/(?:home|root|Users)/\w|\bissue #?\d|pypi\.org|pythonhosted", re.IGNORECASE)


def sources() -> list[Path]:
    """Every text file of the tree, without what tools leave there."""
    tops = [path for path in ROOT.iterdir() if path.name in FOLDERS | {".ci"} or (path.is_file() and path.name[0] != ".")]
    found = [file for top in tops for file in (top.rglob("*") if top.is_dir() else [top]) if file.is_file()]
    return sorted(file for file in found if "__pycache__" not in file.parts and file.suffix not in (".gz", ".so"))


def test_top_level_folders_are_the_named_ones() -> None:
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._"} == FOLDERS


def test_modules_are_short() -> None:
    modules = [file for file in sources() if file.suffix in (".py", ".cpp", ".h") and "tests" not in file.parts]
    lines = {str(file): len(file.read_text().splitlines()) for file in modules}
    assert not {path: count for path, count in lines.items() if count > LONGEST_MODULE}


def test_architecture_names_only_paths_that_exist() -> None:
    quoted = re.findall(r"`([^`\s]+)`", (ROOT / "ARCHITECTURE.md").read_text())
    named = [text for text in quoted if text.endswith(("/", ".py", ".md", ".txt", ".toml")) or text.startswith("scripts/")]
    assert len(named) > 20
    assert not [path for path in named if not (ROOT / path).exists()]


def test_architecture_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("text", ["/home/ann/x.py", "see /root/x", f"issue {12}", f"Issue #{3}"])
def test_private_words_are_found(text: str) -> None:
    assert PRIVATE.search(text)


def test_tree_speaks_of_the_project_alone() -> None:
    texts = {file: file.read_text() for file in sources() if file != Path(__file__)}
    assert not {str(file): found[0] for file, text in texts.items() if (found := PRIVATE.search(text))}
