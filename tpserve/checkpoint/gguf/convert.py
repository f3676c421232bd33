"""A GGUF file written as a Hugging Face folder: config, generation config and tokenizer; weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpserve.checkpoint.gguf import families, family, file, weights
from tpserve.checkpoint.gguf.metadata import Metadata
from tpserve.checkpoint.gguf.reader import Tensor
from tpserve.checkpoint.gguf.tokenizer import write_tokenizer
from tpserve.model.families import for_architecture
from tpserve.model.families import tensors as needed
from tpserve.settings import UserError

_EMBEDDING = "token_embd.weight"
_IDS = {"bos_token_id": "bos", "pad_token_id": "padding"}
_ENDS = ("eos", "eot", "eom")  # of the text, of a turn, of a message
_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|END_OF_TURN_TOKEN|>")
_SAMPLING = "general.sampling."
_SAMPLING_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}  # the others keep theirs


def convert(parts: Sequence[Path], folder: Path) -> None:
    """Write the model of a GGUF file, or of all parts that it was split into, into `folder`, which exists.

    Raises UserError for what is not supported, before anything is written.
    """
    describe(parts, folder)
    write_weights(parts, folder)


def describe(parts: Sequence[Path], folder: Path) -> None:
    """The first half of `convert`: all but the weights."""
    metadata, plan = _plan(parts)
    ids = token_ids(metadata)
    write_tokenizer(metadata, folder)
    _write_json(folder / "config.json", {**plan.config, **ids, "dtype": str(plan.dtype).removeprefix("torch.")})
    _write_json(folder / "generation_config.json", ids | sampling(metadata))


def write_weights(parts: Sequence[Path], folder: Path) -> None:
    """The second half of `convert`: the weights. Raises UserError also if the disk has no room."""
    metadata, plan = _plan(parts)
    weights.check_room(plan, metadata.file, folder)
    print(f"converting {metadata.file} into {folder.parent}", file=sys.stderr)
    weights.write(plan, folder)


def token_ids(metadata: Metadata) -> dict[str, Any]:
    """The ids of config.json and generation_config.json: first token, padding, and all that end an answer."""
    ids: dict[str, Any] = {name: metadata.get(f"tokenizer.ggml.{key}_token_id", int, None) for name, key in _IDS.items()}
    ends = {metadata.get(f"tokenizer.ggml.{key}_token_id", int, None) for key in _ENDS}
    # Files often name only the end of the text; an answer in a chat ends with the end of the turn that the template writes.
    template, tokens = metadata.get("tokenizer.chat_template", str, ""), metadata.get("tokenizer.ggml.tokens", list, [])
    ends |= {tokens.index(text) for text in _TURN_ENDS if text in template and text in tokens}
    found = sorted(id_ for id_ in ends if id_ is not None)
    ids["eos_token_id"] = found[0] if len(found) == 1 else found or None
    return {name: value for name, value in ids.items() if value is not None}


def sampling(metadata: Metadata) -> dict[str, Any]:
    """The makers' sampling parameters, by the names of generation_config.json where that has such."""
    given = {key.removeprefix(_SAMPLING): value for key, value in metadata.values.items() if key.startswith(_SAMPLING)}
    return {_SAMPLING_NAMES.get(name, name): value for name, value in given.items()}


def _plan(parts: Sequence[Path]) -> tuple[Metadata, weights.Plan]:
    """What the file says, and what is to be written of it, all of which is checked."""
    content = file.read(parts)
    metadata = content.metadata
    kind = families.of(metadata)
    family.check(kind, content)
    weights.check_kinds(content.tensors, metadata.file)
    config = kind.config(content)
    names, flags = family.names(kind, content, config["num_hidden_layers"])
    tensors = {name: content.tensors[name] for name in names}
    config = {
        "architectures": [kind.architecture],
        "model_type": kind.model_type,
        "vocab_size": tensors[_EMBEDDING].shape[0],
        **config,
        **flags,
    }
    _check_shapes(metadata.file, config, tensors, names)
    return metadata, weights.Plan(tensors, names, kind, config, weights.dtype_of(tensors))


def _check_shapes(file: str, config: dict[str, Any], tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Raise UserError unless the file's sizes are those of a model that can be, and the tensors are of these sizes."""
    try:
        spec = for_architecture(config["architectures"][0], config).spec(config)
    except UserError as error:
        raise UserError(f"{file}, written as a Hugging Face folder: {error}") from None
    original = {name: key for key, name in names.items()}
    for name, param, _ in needed(spec):
        found = tensors[original[name]].shape
        if found != param.shape:
            raise UserError(
                f"{file}: tensor {original[name]} has shape {list(found)}, the file's sizes say {list(param.shape)};"
                " download or convert it again"
            )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
