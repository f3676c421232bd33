"""A model folder as transformers writes it, read without torch: its config, special tokens and stop ids."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpserve.model.families import by_architecture
from tpserve.settings import UserError

_LARGEST_TEXT = 64 * 1024**2  # bytes
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_text(path: Path) -> str:
    """What is in a text file of bounded size. Raises OSError, UnicodeDecodeError, or UserError if it is no such file."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path} is not a regular file; give one")
    with path.open("rb") as file:
        data = file.read(_LARGEST_TEXT + 1)
    if len(data) > _LARGEST_TEXT:
        raise UserError(f"{path} is larger than {_LARGEST_TEXT} bytes, which no such file is; download it again")
    return data.decode("utf-8")


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is not there and not required. Raises UserError."""
    if not path.exists():
        if path.is_symlink():
            raise UserError(f"{path} is a link that leads nowhere: incomplete download; download it again")
        if required:
            ggufs = sorted(path.parent.glob("*.gguf"))
            remedy = f"give {ggufs[0]}" if ggufs else "give a folder with config.json, tokenizer.json and safetensors"
            raise UserError(f"no {path.name} in {path.parent}; {remedy}")
        return {}
    try:
        content = json.loads(read_text(path))
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


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """What the folder says of its tokenizer, tokens that have a name included.

    Older models keep these in special_tokens_map.json. As in transformers that file then counts for more, unless
    tokenizer_config.json says all of its tokens (`added_tokens_decoder`). Raises UserError.
    """
    config = read_json(folder / "tokenizer_config.json", required=False)
    named = read_json(folder / "special_tokens_map.json", required=False)
    return named | config if "added_tokens_decoder" in config else config | named


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of the tokens that have a name, such as eos_token, by that. Raises UserError for what is no token."""
    config = tokenizer_config(folder)
    return {name: token_text(folder, name, config[name]) for name in _SPECIAL if config.get(name) is not None}


def token_text(folder: Path, name: str, token: Any) -> str:
    """The text of a token, which files have as a string, or as an object with its content. Raises UserError."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise UserError(
            f"{folder}: {name} in tokenizer_config.json or special_tokens_map.json is {token!r};"
            " it must be a string or an object with its content"
        )
    return text


def stop_ids(
    model: Path, config: dict[str, Any], tokenizer: Path, id_of: Callable[[str], int | None], vocab_size: int
) -> tuple[int, ...]:
    """The ids that end an answer: all that config, generation config and tokenizer's folder name, ascending.

    `id_of` gives a token's id. A token whose id the model does not have ends nothing, as it is never sampled. Raises UserError.
    """
    found: set[int] = set()
    for name, content in (
        ("config.json", config),
        ("generation_config.json", read_json(model / "generation_config.json", required=False)),
    ):
        given = content.get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(type(one) is int for one in ids):
            raise UserError(f"{model / name}: eos_token_id must be a number or a list of numbers, not {given!r}")
        found.update(ids)
    if beyond := [one for one in found if not 0 <= one < vocab_size]:
        raise UserError(f"{model}: eos_token_id {beyond[0]} is no id of a vocabulary of {vocab_size}; correct config.json")
    eos_token = special_tokens(tokenizer).get("eos_token")
    eos_id = None if eos_token is None else id_of(eos_token)
    return tuple(sorted(found if eos_id is None or eos_id >= vocab_size else found | {eos_id}))
