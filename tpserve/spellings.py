"""By which names settings go: flags, keys of a file, keywords in Python; and the names other engines have besides.

A *key* is a name with underscores and without leading dashes: `--max-num-seqs` and `max-num-seqs` are `max_num_seqs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from tpserve.settings import Flag, Settings, UserError

# Flags of other engines whose absence changes nothing here, and what they take: "switch", "any" value, or only that value.
NEUTRAL = {
    ("--enforce-eager",): "switch",
    ("--disable-custom-all-reduce",): "switch",
    ("--disable-log-requests",): "switch",
    ("--disable-log-stats",): "switch",
    ("--swap-space",): "any",
    ("--pipeline-parallel-size", "-pp"): "1",
    ("--data-parallel-size", "-dp"): "1",
    ("--distributed-executor-backend",): "mp",
    ("--tokenizer-mode",): "auto",
}
# Keys of what is refused by name.
NOT_BUILT = {
    "api_key", "cpu_offload_gb", "enable_auto_tool_choice", "enable_expert_parallel", "enable_lora",
    "generation_config", "hf_overrides", "lora_modules", "max_logprobs", "quantization", "reasoning_parser",
    "rope_scaling", "rope_theta", "root_path", "speculative_config", "ssl_certfile", "ssl_keyfile", "tokenizer",
    "tool_call_parser",
}  # fmt: skip


def key(name: str) -> str:
    """The name without what a flag adds to it."""
    return name.lstrip("-").replace("-", "_")


def _flag(field: str) -> Flag:
    return next(detail for detail in Settings.model_fields[field].metadata if isinstance(detail, Flag))


FLAGS = {field: _flag(field) for field in Settings.model_fields}
FIELDS = {key(name): field for field, flag in FLAGS.items() for name in flag.names}  # every key and its setting
_TAKES = {key(name): takes for names, takes in NEUTRAL.items() for name in names}


def is_foreign(name: str) -> bool:
    """Whether it is a setting of other engines that has no counterpart here."""
    return key(name) in _TAKES or key(name) in NOT_BUILT


def foreign_note(name: str, value: object) -> str | None:
    """What to tell who gives a foreign setting, if anything. Raises UserError for a value that would change something."""
    if value is None or str(value).lower() == "false":
        return None
    if key(name) in NOT_BUILT:
        raise unknown(name)
    takes = _TAKES[key(name)]
    if takes in ("switch", "any"):
        return f"{name} has no effect here"
    if str(value) != takes:
        raise UserError(f"{name} {value} is not supported yet, only {takes}")
    return None


def unknown(name: str, known: Iterable[str] = FIELDS, cutoff: float = 0.6) -> UserError:
    """The refusal of a name that is no setting, with the nearest of the known ones, of a likeness of `cutoff` at least."""
    if key(name) in NOT_BUILT:
        return UserError(f"{name} is not supported yet")
    if key(name) == "hf_token":
        return UserError(f"{name}: others could read a token that stands there; set HF_TOKEN, or run hf auth login")
    nearest = get_close_matches(name, known, 1, cutoff)
    meant = f"did you mean {nearest[0]}?" if nearest else "tpserve launch --help lists the settings"
    return UserError(f"no such setting: {name}; {meant}")
