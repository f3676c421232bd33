"""Checkpoints that are not what they should be, and those that are in an unusual way."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.tiny import Tiny
from tpserve.checkpoint import folder, headers
from tpserve.model.families import llama
from tpserve.model.spec import ModelSpec
from tpserve.settings import UserError

FILE = "model.safetensors"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that may be spoilt."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def checked(model: Path) -> list[str]:
    """The unused tensors of a folder that passes."""
    return headers.check(spec_of(model), headers.scan(model))


def spec_of(model: Path) -> ModelSpec:
    return llama.spec(folder.read_json(model / "config.json"))


def refusal(model: Path) -> str:
    with pytest.raises(UserError) as caught:
        checked(model)
    return str(caught.value)


def change(model: Path, **changes: np.ndarray | None) -> None:
    """Rewrite the weights with other tensors; None removes one. Dots are written as double underscores."""
    tensors = load_file(model / FILE)
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, model / FILE)


def shard(model: Path, count: int = 3) -> list[Path]:
    """Split the only file into shards with an index."""
    tensors = load_file(model / FILE)
    (model / FILE).unlink()
    names = sorted(tensors, reverse=True)
    where = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, model / file)
    (model / headers.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return sorted(model / file for file in set(where.values()))


def test_one_file_and_shards_hold_the_same_tensors(model: Path) -> None:
    one = headers.scan(model)
    shard(model)
    several = headers.scan(model)
    assert checked(model) == []
    assert {name: (t.shape, t.dtype) for name, t in one.items()} == {name: (t.shape, t.dtype) for name, t in several.items()}
    assert len({t.file for t in several.values()}) == 3


def test_index_that_names_a_missing_shard_is_refused_by_its_name(model: Path) -> None:
    missing = shard(model)[1]
    missing.unlink()
    assert f"names {missing.name}, which is not there: incomplete download" in refusal(model)


@pytest.mark.parametrize("where", [None, [], {"a": 1}, {"a": "../model.safetensors"}])
def test_index_without_a_usable_map_is_refused(model: Path, where: Any) -> None:
    (model / FILE).unlink()
    (model / headers.INDEX).write_text(json.dumps({"weight_map": where}))
    assert "has no weight_map" in refusal(model)


def test_tensor_that_its_shard_lacks_is_refused_by_name(model: Path) -> None:
    for path in shard(model):
        tensors = load_file(path)
        tensors.pop(NORM, None)
        save_file(tensors, path)
    assert f"tensor {NORM} is in none" in refusal(model)


def test_missing_tensor_is_refused_by_name(model: Path) -> None:
    change(model, model__layers__1__mlp__up_proj__bias=None)
    assert "tensor model.layers.1.mlp.up_proj.bias is in none" in refusal(model)


def test_wrong_shape_is_refused_with_both_shapes(model: Path) -> None:
    change(model, model__norm__weight=np.zeros(53, np.float32))
    text = refusal(model)
    assert FILE in text
    assert f"tensor {NORM} has shape [53], config.json says [54]" in text


def test_unexpected_type_is_refused_by_name(model: Path) -> None:
    change(model, model__norm__weight=np.zeros(54, np.int64))
    assert f"tensor {NORM} is of type I64; supported: F32, F16, BF16" in refusal(model)


def test_bfloat16_needs_no_numpy_type(model: Path) -> None:
    header = {NORM: {"dtype": "BF16", "shape": [54], "data_offsets": [0, 108]}}
    text = json.dumps(header).encode()
    (model / FILE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(108))
    assert headers.scan(model) == {NORM: headers.Stored(model / FILE, (54,), "BF16")}


def test_extra_tensors_are_named_not_refused(model: Path) -> None:
    change(model, model__rotary__inv_freq=np.zeros(4, np.float32), a__b=np.zeros(1, np.int64))
    assert checked(model) == ["a.b", "model.rotary.inv_freq"]


def test_head_of_its_own_is_required_where_it_is_not_tied(model: Path) -> None:
    assert checked(model) == []
    change(model, lm_head__weight=None)
    assert f"tensor {HEAD} is in none" in refusal(model)
    assert "tie_word_embeddings" in refusal(model)


def test_tied_head_is_the_embedding_but_for_a_stored_one(tiny_folder: Callable[[Tiny], Path], tmp_path: Path) -> None:
    model = shutil.copytree(tiny_folder(Tiny(tie=True)), tmp_path / "model")
    assert HEAD not in headers.scan(model)
    assert checked(model) == []
    assert headers.untie(spec_of(model), headers.scan(model)).tied
    change(model, lm_head__weight=load_file(model / FILE)["model.embed_tokens.weight"])
    own = headers.untie(spec_of(model), headers.scan(model))
    assert not own.tied
    assert headers.check(own, headers.scan(model)) == []


def test_no_weights_are_refused_with_what_was_looked_for(model: Path) -> None:
    (model / FILE).unlink()
    assert refusal(model).startswith(f"no weights in {model}: looked for *.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_alone_are_refused_with_how_to_convert(model: Path, name: str) -> None:
    (model / FILE).rename(model / name)
    text = refusal(model)
    assert name in text
    assert "only safetensors and GGUF are read: convert it" in text


class _Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_pickle_under_a_safetensors_name_is_refused_and_not_unpickled(model: Path, tmp_path: Path) -> None:
    (model / FILE).write_bytes(pickle.dumps(_Payload(tmp_path / "ran")))
    assert "is a pickle, whatever its name says" in refusal(model)
    assert not (tmp_path / "ran").exists()


def test_archive_of_torch_save_under_a_safetensors_name_is_refused(model: Path) -> None:
    (model / FILE).write_bytes(b"PK\x03\x04" + bytes(1000))
    assert "is a pickle" in refusal(model)


@pytest.mark.parametrize("lost", [1, 4096, 300_000])
def test_truncated_file_is_refused_with_both_sizes(model: Path, lost: int) -> None:
    size = (model / FILE).stat().st_size
    os.truncate(model / FILE, size - lost)
    assert f"{model / FILE} has {size - lost} bytes, its header says {size}: incomplete download" in refusal(model)


@pytest.mark.parametrize("content", [b"", b"abc", b"\x10" + bytes(7) + b"not json at all!", bytes(100), b"\xff" * 100])
def test_file_of_anything_else_is_refused_by_name(model: Path, content: bytes) -> None:
    (model / FILE).write_bytes(content)
    assert refusal(model).startswith(str(model / FILE))


def test_lfs_pointer_is_refused_with_how_to_fetch(model: Path) -> None:
    (model / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git lfs pull" in refusal(model)


def test_file_beside_the_single_one_is_not_read(model: Path) -> None:
    weights = load_file(model / FILE)
    save_file({name: np.zeros_like(tensor) for name, tensor in weights.items()}, model / "zz.safetensors")
    assert {stored.file for stored in headers.scan(model).values()} == {model / FILE}


def test_single_file_goes_before_an_index(model: Path, tmp_path: Path) -> None:
    weights = (model / FILE).read_bytes()
    shard(model)
    (model / FILE).write_bytes(weights)
    assert {stored.file for stored in headers.scan(model).values()} == {model / FILE}


def test_weights_in_mistrals_own_form_are_no_second_copy(model: Path) -> None:
    shutil.copy(model / FILE, model / "consolidated.safetensors")
    (model / FILE).rename(model / "weights.safetensors")
    assert checked(model) == []
    (model / "weights.safetensors").unlink()
    assert f"{model} has its weights in consolidated.safetensors, a form of Mistral's that is not read" in refusal(model)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors", headers.INDEX, "a.safetensors"], ["model.safetensors"]),
        ([headers.INDEX, "c.safetensors"], ["a.safetensors", "b.safetensors"]),
        (
            ["b.safetensors", "a.safetensors", "sub/c.safetensors", "consolidated.00.safetensors", "x.bin"],
            ["a.safetensors", "b.safetensors"],
        ),
        (["config.json"], []),
    ],
)
def test_files_of_the_weights_are_chosen_from_names(tmp_path: Path, names: list[str], expected: list[str]) -> None:
    (tmp_path / headers.INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    assert headers.weight_files(tmp_path, names) == expected


def test_tensor_in_two_files_without_an_index_is_refused(model: Path) -> None:
    shutil.copy(model / FILE, model / "b.safetensors")
    (model / FILE).rename(model / "a.safetensors")
    message = refusal(model)
    assert "a.safetensors" in message
    assert "b.safetensors" in message


def test_weights_that_cannot_be_opened_are_refused_by_name(model: Path) -> None:
    (model / FILE).unlink()
    (model / FILE).mkdir()
    assert f"cannot read {model / FILE}" in refusal(model)
