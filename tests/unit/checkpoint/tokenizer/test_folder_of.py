"""Where the tokenizer.json of a model folder is, and that it is made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.checkpoint.tokenizer.models import AS_IT_IS, sentencepiece, write
from tpserve.checkpoint.source import describe
from tpserve.checkpoint.tokenizer import folder_of
from tpserve.settings import Settings, UserError
from tpserve.tokenizer import Tokenizer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("names", [["tokenizer.json", "tokenizer.model"], [], ["vocab.json"]])
def test_folder_with_tokenizer_json_or_no_tokenizer_is_its_own(tmp_path: Path, cache: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert folder_of(tmp_path) == tmp_path
    assert not cache.exists()


def test_tokenizer_model_is_converted_once_until_it_changes(tmp_path: Path, cache: Path) -> None:
    model = write(tmp_path / "llama", sentencepiece(model_type="bpe", **AS_IT_IS))
    first = folder_of(model)
    assert first.parent == cache / "tokenizers"
    assert describe(Settings(model=str(model))).tokenizer == first
    assert Tokenizer(first).special_ids == {0, 1, 2}
    (first / "tokenizer_config.json").write_text("{}")  # to see whether it is written again
    assert folder_of(model) == first
    assert (first / "tokenizer_config.json").read_text() == "{}"
    write(model, tokenizer_config={"add_bos_token": False})
    assert folder_of(model) != first
    assert sorted(path.name for path in model.iterdir()) == ["tokenizer.model", "tokenizer_config.json"]


def test_file_that_is_no_tokenizer_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    model = write(tmp_path / "llama", b"nothing of the kind")
    with pytest.raises(UserError, match=r"llama/tokenizer\.model: is no SentencePiece model"):
        folder_of(model)
    assert not [path for path in (cache / "tokenizers").iterdir() if path.is_dir()]
