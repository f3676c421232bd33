"""A model folder as transformers writes it, read without torch: its config, tokenizer and stop ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tpserve.checkpoint.source import Source
from tpserve.model.families import by_architecture
from tpserve.settings import UserError

_CONVERT_TOKENIZER = "write it with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is not there and not required. Raises UserError."""
    if not path.exists():
        if required:
            raise UserError(f"no {path.name} in {path.parent}; give a folder with config.json, tokenizer.json and safetensors")
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object; download it again")
    return content


def architecture(config: dict[str, Any]) -> str:
    """What config.json says the model is."""
    match config.get("architectures"):
        case [str(first), *_]:
            return first
        case other:
            known = ", ".join(by_architecture())
            raise UserError(f"config.json: architectures is {other!r}; it must be a list that names one of: {known}")


def check_quantization(config: dict[str, Any]) -> None:
    """Refuse quantized weights by the name of their method."""
    for name in ("quantization_config", "compression_config"):
        if quantization := config.get(name):
            method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
            raise UserError(f"config.json: {name} with method {method!r} is not supported yet; give the unquantized model")


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The folder's tokenizer. Raises UserError if it is missing, unreadable or has ids beyond the model's vocabulary."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UserError(f"no tokenizer.json in {folder}; {_CONVERT_TOKENIZER}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"{path} is no readable tokenizer ({error}); download it again") from None
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if size > vocab_size:
        raise UserError(
            f"{path} has ids up to {size - 1}, but the embedding has {vocab_size} rows; they are of different models"
        )
    return tokenizer


def stop_ids(files: Source, config: dict[str, Any], tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """The ids that end an answer: all that config, generation config and tokenizer config name, ascending."""
    found: set[int] = set()
    for name, content in (
        ("config.json", config),
        ("generation_config.json", read_json(files.path / "generation_config.json", required=False)),
    ):
        match content.get("eos_token_id"):
            case None:
                pass
            case int(one):
                found.add(one)
            case [*several] if all(isinstance(one, int) for one in several):
                found.update(several)
            case other:
                raise UserError(f"{files.path / name}: eos_token_id must be a number or a list of numbers, not {other!r}")
    if beyond := [one for one in found if not 0 <= one < vocab_size]:
        raise UserError(f"{files.path}: eos_token_id {beyond[0]} is no id of a vocabulary of {vocab_size}; correct config.json")
    token = read_json(files.tokenizer / "tokenizer_config.json", required=False).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    token_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return tuple(sorted(found if token_id is None else found | {token_id}))
