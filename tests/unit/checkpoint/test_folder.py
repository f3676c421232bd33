"""Reading a model folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import END, tokenizer
from tpserve.checkpoint import folder
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


def stop_ids(path: Path, config: dict[str, Any], vocab_size: int = 257) -> tuple[int, ...]:
    return folder.stop_ids(path, config, path, tokenizer(257).token_to_id, vocab_size)


@pytest.mark.parametrize(
    ("config", "named", "expected"),
    [
        ({"eos_token": "</s>"}, None, {"eos_token": "</s>"}),
        (
            None,
            {"eos_token": "</s>", "bos_token": {"content": "<s>", "lstrip": False}},
            {"eos_token": "</s>", "bos_token": "<s>"},
        ),
        ({"bos_token": "<a>", "pad_token": "<p>"}, {"bos_token": "<b>"}, {"bos_token": "<b>", "pad_token": "<p>"}),
        (
            {"bos_token": "<a>", "added_tokens_decoder": {}},
            {"bos_token": "<b>", "eos_token": "</b>"},
            {"bos_token": "<a>", "eos_token": "</b>"},
        ),
        ({"bos_token": None, "added_tokens_decoder": {}}, {"bos_token": "<b>"}, {}),
        ({"eos_token": None, "add_bos_token": True, "additional_special_tokens": ["<x>"]}, None, {}),
    ],
)
def test_special_tokens_are_those_of_both_files(tmp_path: Path, config: Any, named: Any, expected: dict[str, str]) -> None:
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", named)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert folder.special_tokens(tmp_path) == expected


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("value", [{}, {"content": 1}, 5, True, ["</s>"]])
def test_special_token_that_is_none_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / name).write_text(json.dumps({"eos_token": value}))
    with pytest.raises(UserError, match=rf"^{tmp_path}: eos_token in .*{name}.*; it must be a string or an object"):
        folder.special_tokens(tmp_path)


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
    assert stop_ids(tmp_path, config) == expected


def test_stop_id_may_be_named_in_special_tokens_map_alone(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": END}}))
    assert stop_ids(tmp_path, {}) == (0,)


def test_stop_token_that_the_model_does_not_have_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    (id_,) = stop_ids(tmp_path, {})
    assert id_ > 0
    assert stop_ids(tmp_path, {}, id_) == ()


@pytest.mark.parametrize("value", ["2", [1, "2"], 1.5, {"id": 2}, True, [[2]]])
def test_stop_ids_of_another_type_are_refused_by_file(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UserError, match=r"config\.json: eos_token_id must be"):
        stop_ids(tmp_path, {"eos_token_id": value})


@pytest.mark.parametrize("value", [-1, 257, 10**30])
def test_stop_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, value: int) -> None:
    with pytest.raises(UserError, match=f"eos_token_id {value} is no id of a vocabulary of 257"):
        stop_ids(tmp_path, {"eos_token_id": [2, value]})


def test_link_that_leads_nowhere_is_an_incomplete_download(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"generation_config\.json is a link that leads nowhere: incomplete download"):
        folder.read_json(tmp_path / "generation_config.json", required=False)


def test_text_of_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        with pytest.raises(UserError, match=f"{path} is not a regular file"):
            folder.read_text(path)


def test_text_beyond_any_such_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(UserError, match="larger than"):
        folder.read_json(tmp_path / "config.json")
