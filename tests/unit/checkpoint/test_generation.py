from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpserve.checkpoint import generation
from tpserve.sampling import SamplingDefaults
from tpserve.settings import UserError


def folder(path: Path, **content: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(content))
    return path


def notes(path: Path) -> list[str]:
    return generation.notes(path, generation.defaults(path))


@pytest.mark.parametrize(
    "content",
    [{}, {"eos_token_id": [1, 2], "max_length": 20}, {"temperature": None, "top_k": None, "no_repeat_ngram_size": None}],
)
def test_file_without_defaults_leaves_openais_and_says_nothing(tmp_path: Path, content: dict[str, Any]) -> None:
    assert generation.defaults(folder(tmp_path, **content)) == SamplingDefaults()
    assert notes(tmp_path) == []


def test_missing_file_is_as_one_without_defaults(tmp_path: Path) -> None:
    assert generation.defaults(tmp_path) == SamplingDefaults()
    assert notes(tmp_path) == []


def test_defaults_are_read_and_shown_in_one_line(tmp_path: Path) -> None:
    folder(tmp_path, temperature=0, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1, eos_token_id=1)
    assert generation.defaults(tmp_path) == SamplingDefaults(
        temperature=0.0, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1
    )
    (line,) = notes(tmp_path)
    assert line.endswith(" temperature 0.0, top_p 0.95, top_k 20, min_p 0.05, repetition_penalty 1.1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", True),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", [1.2]),
    ],
)
def test_value_that_no_request_may_have_is_refused_with_file_and_name(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        generation.defaults(folder(tmp_path, **{"top_p": 0.9, name: value}))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'generation_config.json'}: {name} is {value!r}: ")
    assert text.endswith("; correct it or take it out")
    assert "\n" not in text


def test_what_would_change_the_output_and_is_not_done_is_named(tmp_path: Path) -> None:
    folder(
        tmp_path, typical_p=0.9, no_repeat_ngram_size=3, do_sample=False, num_beams=1, bad_words_ids=[[5]], suppress_tokens=[]
    )
    (line,) = notes(tmp_path)
    assert line.endswith("not applied: bad_words_ids, do_sample, no_repeat_ngram_size, typical_p")
