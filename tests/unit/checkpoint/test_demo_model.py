"""The demo model as it was made: the facts that the rest of the tests rest upon."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model / "tokenizer.json"))


def test_demo_weights_are_the_known_ones(demo_model: Path) -> None:
    with (demo_model / "model.safetensors").open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


def test_demo_config_has_the_published_sizes(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    sizes = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    sizes |= {"intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192}
    rest = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu"}
    assert config.items() >= (sizes | rest).items()
    assert AutoConfig.from_pretrained(demo_model).rope_parameters["rope_theta"] == 1e5


# Ids as llama.cpp gives them for the same GGUF file.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("   1.", [333, 33, 30]),
        (" ½", [216, 16738]),
        ("1, 2, 3, 4, 5,", [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28]),
        ("The sun rises in the", [504, 2388, 13685, 281, 260]),
        ("<|im_start|>", [1]),
    ],
)
def test_demo_tokenizer_splits_as_in_training(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text).ids == ids


# Bytes of a few control characters and of unassigned ones are not in its vocabulary.
@given(st.text(st.characters(exclude_categories=["C"])))
def test_demo_tokenizer_gives_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_demo_folder_read_by_transformers_keeps_the_digits_rule_and_the_chat_template(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    assert tokenizer("   1.").input_ids == [333, 33, 30]
    messages = [{"role": "user", "content": "Hi 42"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert len(ids) == 34
    assert ids[:4] == [1, 9690, 198, 2683]
    assert ids[-4:] == [1, 520, 9531, 198]
