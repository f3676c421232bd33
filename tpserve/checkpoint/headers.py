"""What a folder's safetensors files say they hold, compared with what the model needs. Reads no weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tpserve.checkpoint.folder import read_json
from tpserve.model.families import family, tensors
from tpserve.model.spec import ModelSpec
from tpserve.settings import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # what can be loaded, and our names
CONVERT = (
    "only safetensors and GGUF are read: convert it, where you trust it, with"
    " AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) of transformers"
)


@dataclass(frozen=True)
class Stored:
    """A tensor as its file's header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # the format's name, such as BF16


def scan(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder by name. Raises UserError."""
    names = [path.name for path in folder.iterdir()]
    files = weight_files(folder, names)
    if not files:
        raise _no_weights(folder, names)
    if SINGLE not in names and INDEX in names:
        return _indexed(folder)
    found: dict[str, Stored] = {}
    for file in (folder / name for name in files):
        for name, stored in _header(file).items():
            if name in found:
                raise UserError(f"tensor {name} is in {found[name].file} and in {file}; keep the files of one model there")
            found[name] = stored
    return found


def weight_files(folder: Path, names: Collection[str]) -> list[str]:
    """The files that hold the model's weights, of all `names` there are; the index, where it decides, is in the folder.

    As in transformers: model.safetensors, else what the index names. Else all safetensors files. Raises UserError.
    """
    if SINGLE in names:
        return [SINGLE]
    return sorted(set(weight_map(folder).values())) if INDEX in names else safetensors(names)


def safetensors(names: Collection[str]) -> list[str]:
    """Those of the names that weights may be under: not in subfolders, nor Mistral's own form, of other tensor names."""
    return sorted(name for name in names if name.endswith(".safetensors") and "/" not in name and not _is_mistrals(name))


def _is_mistrals(name: str) -> bool:
    return name.startswith("consolidated") and name.endswith(".safetensors")


def _no_weights(folder: Path, names: Collection[str]) -> UserError:
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    if pickles:
        return UserError(f"{folder} has its weights in {pickles[0]}; {CONVERT}")
    mistrals = sorted(filter(_is_mistrals, names))
    if mistrals:
        return UserError(f"{folder} has its weights in {mistrals[0]}, a form of Mistral's that is not read; give {SINGLE}")
    return UserError(f"no weights in {folder}: looked for *.safetensors and {INDEX}")


def untie(spec: ModelSpec, stored: Mapping[str, Stored]) -> ModelSpec:
    """The model with its own head, if the checkpoint has one: as transformers does, a tie is only for want of it."""
    own = replace(spec, tied=False)
    head = next(param for param in family(spec.family).params(own) if param.name == "head")
    return own if head.tensor in stored else spec


def check(spec: ModelSpec, stored: Mapping[str, Stored]) -> list[str]:
    """Raise UserError unless every tensor of the model is there as it must be. Returns the names that nothing uses."""
    needed = set()
    for name, param, _ in tensors(spec):
        needed.add(name)
        if name not in stored:
            also = " and tie_word_embeddings in config.json is not true" if param.name == "head" else ""
            raise UserError(f"tensor {name} is in none of the safetensors files{also}; download the model again")
        found = stored[name]
        if found.shape != param.shape:
            raise UserError(
                f"{found.file}: tensor {name} has shape {list(found.shape)}, config.json says {list(param.shape)};"
                " weights and config.json are of different models"
            )
        if found.dtype not in DTYPES:
            raise UserError(f"{found.file}: tensor {name} is of type {found.dtype}; supported: {', '.join(DTYPES)}")
    return sorted(stored.keys() - needed)


def weight_map(folder: Path) -> dict[str, str]:
    """File name by tensor name, as the folder's index has it. Raises UserError if that is no such map."""
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) and file == Path(file).name for file in where.values()):
        raise UserError(f"{folder / INDEX} has no weight_map of tensor names to file names; download it again")
    return where


def _indexed(folder: Path) -> dict[str, Stored]:
    where = weight_map(folder)
    headers: dict[str, dict[str, Stored]] = {}
    for file in sorted(set(where.values())):
        if not (folder / file).is_file():
            raise UserError(f"{folder / INDEX} names {file}, which is not there: incomplete download; download it again")
        headers[file] = _header(folder / file)
    return {name: headers[file][name] for name, file in where.items() if name in headers[file]}


def _header(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            return {name: Stored(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        raise UserError(_diagnose(file, error)) from None
    except OSError as error:
        raise UserError(
            f"cannot read {file} ({error.strerror or error}); check that it is a file and that you may read it"
        ) from None


def _diagnose(file: Path, error: SafetensorError) -> str:
    """Why the library refuses the file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        header = opened.read(length) if length <= size else b""
    if start.startswith((b"\x80", b"PK\x03\x04")):  # a pickle, and the archive that torch.save puts around one
        return f"{file} is a pickle, whatever its name says; {CONVERT}"
    if start.startswith(b"version "):
        return f"{file} is a Git LFS pointer, not the weights; fetch them with git lfs pull"
    try:
        parts = json.loads(header)
        expected = 8 + length + max(part["data_offsets"][1] for name, part in parts.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return f"{file} with its {size} bytes is no safetensors file ({error}); download it again"
    if expected != size:
        cause = "incomplete download" if size < expected else "something was added to it"
        return f"{file} has {size} bytes, its header says {expected}: {cause}; download it again"
    return f"{file} is no valid safetensors file ({error}); download it again"
