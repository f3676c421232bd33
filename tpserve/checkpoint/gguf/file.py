"""Opening a GGUF file: what it holds, mapped into memory, or in one line why it cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpserve.checkpoint.gguf import reader
from tpserve.checkpoint.gguf.metadata import Metadata
from tpserve.checkpoint.gguf.reader import Tensor
from tpserve.settings import UserError

_VERSIONS = (2, 3)
_AGAIN = "download it again"


@dataclass(frozen=True)
class Content:
    """What the parts of a GGUF file hold."""

    metadata: Metadata
    tensors: dict[str, Tensor]  # in the order of the file


def read(parts: Sequence[Path]) -> Content:
    """The content of a file, or of all the parts that one was split into. Raises UserError."""
    contents = [_read(part) for part in parts]
    metadata = Metadata(str(parts[0]), contents[0][0])
    _check_kind(metadata)
    if (count := metadata.get("split.count", int, 1)) not in (0, len(parts)):
        raise UserError(
            f"{parts[0]}: is one of {count} files; name them as they were, ending in -00001-of-{count:05}.gguf and so on"
        )
    return Content(metadata, {name: tensor for _, tensors in contents for name, tensor in tensors.items()})


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with path.open("rb") as file:
        magic, version = file.read(4), int.from_bytes(file.read(4), "little")
    if magic != b"GGUF":
        raise UserError(f"{path}: is no GGUF file: it begins with {magic!r}; {_AGAIN}")
    if version & 0xFFFF == 0:  # a small number with its bytes in the other order
        raise UserError(f"{path}: is a big-endian GGUF file; only little-endian ones are read: download or convert such a one")
    if version not in _VERSIONS:
        raise UserError(f"{path}: is of GGUF version {version}; supported: {', '.join(map(str, _VERSIONS))}")
    try:
        return reader.read(path)
    except ValueError as error:
        raise UserError(f"{path}: is incomplete or damaged ({error}); {_AGAIN}") from None


def _check_kind(metadata: Metadata) -> None:
    kind, architecture = metadata.get("general.type", str, "model"), metadata.get("general.architecture", str, None)
    if kind == "adapter":
        raise UserError(f"{metadata.file}: is an adapter (LoRA), not a model; adapters are not supported: give a merged model")
    if kind == "mmproj" or architecture == "clip":
        raise UserError(
            f"{metadata.file}: is the image part (mmproj) of a model; images are not supported: give the file of its text part"
        )
    if kind != "model":
        raise UserError(f"{metadata.file}: holds {kind!r}, not a model")
