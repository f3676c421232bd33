"""Reading a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import END, tokenizer
from tpserve.checkpoint import folder
from tpserve.checkpoint.source import Source
from tpserve.settings import UserError


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe{}", b"[" * 100_000, b"[1]", b"null"])
def test_read_json_of_anything_but_an_object_is_refused_by_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=str(tmp_path / "config.json")) as refusal:
        folder.read_json(tmp_path / "config.json")
    assert len(str(refusal.value)) < 300


def test_read_json_of_a_missing_file_is_refused_unless_it_may_be_missing(tmp_path: Path) -> None:
    assert folder.read_json(tmp_path / "generation_config.json", required=False) == {}
    with pytest.raises(UserError, match=rf"^no config\.json in {tmp_path}"):
        folder.read_json(tmp_path / "config.json")


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [7]])
def test_architecture_that_is_not_named_is_refused_with_those_that_work(value: Any) -> None:
    with pytest.raises(UserError, match=r"one of: LlamaForCausalLM, "):
        folder.architecture({"architectures": value})


@pytest.mark.parametrize("value", [{"quant_method": "awq", "bits": 4}, "awq"])
def test_quantization_is_refused_by_method(value: Any) -> None:
    with pytest.raises(UserError, match="'awq' is not supported yet"):
        folder.check_quantization({"quantization_config": value})


def test_tokenizer_may_fill_the_embedding_but_not_exceed_it(tmp_path: Path) -> None:
    tokenizer(257).save(str(tmp_path / "tokenizer.json"))
    assert folder.read_tokenizer(tmp_path, 257).get_vocab_size() == 257
    with pytest.raises(UserError, match="ids up to 256, but the embedding has 256 rows"):
        folder.read_tokenizer(tmp_path, 256)


def test_tokenizer_that_is_missing_or_corrupt_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^no tokenizer\.json in {tmp_path}"):
        folder.read_tokenizer(tmp_path, 300)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match=rf"^{tmp_path}/tokenizer\.json is no readable tokenizer"):
        folder.read_tokenizer(tmp_path, 300)


@pytest.mark.parametrize(
    ("config", "generation", "token", "expected"),
    [
        ({"eos_token_id": 7}, None, None, (7,)),
        ({}, {"eos_token_id": [9, 8]}, None, (8, 9)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 8}, END, (0, 7, 8)),
        ({"eos_token_id": None}, None, {"content": END}, (0,)),
        ({}, None, "<|no such token|>", ()),
        ({}, {}, None, ()),
    ],
)
def test_stop_ids_are_the_union_of_all_that_name_them(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, token: Any, expected: tuple[int, ...]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    if token is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    assert folder.stop_ids(Source(tmp_path, tmp_path, "m"), config, tokenizer(257), 257) == expected


@pytest.mark.parametrize("value", ["2", [1, "2"], 1.5, {"id": 2}])
def test_stop_ids_of_another_type_are_refused_by_file(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UserError, match=r"config\.json: eos_token_id must be"):
        folder.stop_ids(Source(tmp_path, tmp_path, "m"), {"eos_token_id": value}, tokenizer(257), 257)


@pytest.mark.parametrize("value", [-1, 257, 10**30])
def test_stop_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, value: int) -> None:
    with pytest.raises(UserError, match=f"eos_token_id {value} is no id of a vocabulary of 257"):
        folder.stop_ids(Source(tmp_path, tmp_path, "m"), {"eos_token_id": [2, value]}, tokenizer(257), 257)
