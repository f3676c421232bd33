"""A GGUF file written as a Hugging Face folder: config, generation config, weights, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpserve.checkpoint.gguf import families, family, file, weights
from tpserve.checkpoint.gguf.metadata import Metadata
from tpserve.checkpoint.gguf.tokenizer import write_tokenizer

_IDS = {"bos_token_id": "bos", "pad_token_id": "padding"}
_ENDS = ("eos", "eot", "eom")  # of the text, of a turn, of a message
_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|END_OF_TURN_TOKEN|>")


def convert(parts: Sequence[Path], folder: Path) -> None:
    """Write the model of a GGUF file, or of all parts that it was split into, into `folder`, which exists.

    Raises UserError for what is not supported, before anything is written.
    """
    content = file.read(parts)
    metadata = content.metadata
    kind = families.of(metadata)
    family.check_keys(kind, metadata)
    config = kind.config(content)
    names, flags = family.names(kind, content, config["num_hidden_layers"])
    tensors = {name: content.tensors[name] for name in names}
    plan = weights.Plan(tensors, names, kind, config, weights.dtype_of(tensors))
    weights.check(plan, metadata.file, folder)
    ids = token_ids(metadata)
    config = {
        "architectures": [kind.architecture],
        "model_type": kind.model_type,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        **config,
        **flags,
        **ids,
        "dtype": str(plan.dtype).removeprefix("torch."),
    }
    write_tokenizer(metadata, folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)
    weights.write(plan, folder)


def token_ids(metadata: Metadata) -> dict[str, Any]:
    """The ids of config.json and generation_config.json: first token, padding, and all that end an answer."""
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _IDS.items()}
    ends = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _ENDS} - {None}
    # Files often name only the end of the text; an answer in a chat ends with the end of the turn that the template writes.
    template, tokens = metadata.get("tokenizer.chat_template", ""), metadata.get("tokenizer.ggml.tokens", [])
    ends |= {tokens.index(text) for text in _TURN_ENDS if text in template and text in tokens}
    found = sorted(ends)
    ids["eos_token_id"] = found[0] if len(found) == 1 else found or None
    return {name: value for name, value in ids.items() if value is not None}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
