"""How long, how many and how much at once: the limits that follow from settings, model and KV pool together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpserve.model.spec import Dynamic, ModelSpec
from tpserve.settings import Settings, UserError

MOST_COLUMNS = 16  # of a step's decode rows together, where they have drafts

_STEP_TOKENS = {"cpu": 512, "cuda": 8192}  # a CPU's step stays short enough for the streams that wait for it


def most_samples(settings: Settings, max_num_seqs: int) -> int:
    """How many ids a step may sample: one a row, and where rows have drafts, one after each of these."""
    return max_num_seqs + (MOST_COLUMNS - 1 if settings.speculates else 0)


@dataclass(frozen=True)
class Limits:
    """As the fields of the same names in `Deployment`."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    notes: tuple[str, ...]


def limits(settings: Settings, spec: ModelSpec, pool_tokens: int | None, device: Literal["cpu", "cuda"]) -> Limits:
    """Resolve the automatic ones and adjust those that contradict each other. Raises UserError if that cannot be.

    `pool_tokens` is None where only a loaded device can tell.
    """
    length = _length(settings, spec, pool_tokens)
    if length < 2:
        raise UserError(
            f"the KV pool holds {pool_tokens} tokens, too few for a prompt and an answer; give more --kv-cache-memory"
        )
    cut = _cut(settings, spec, length)
    length, tokens, notes = _step_tokens(settings, length, _STEP_TOKENS[device])
    notes = cut + notes
    seqs = settings.max_num_seqs
    if tokens < seqs:
        notes += (
            f"--max-num-batched-tokens {tokens} lowers --max-num-seqs from {seqs} to {tokens}: a step needs a token of each",
        )
    return Limits(length, min(seqs, tokens), tokens, notes)


def _length(settings: Settings, spec: ModelSpec, pool_tokens: int | None) -> int:
    wanted = settings.max_model_len
    fits = spec.max_position if pool_tokens is None else min(spec.max_position, pool_tokens)
    if wanted == "auto":
        return fits
    if wanted > spec.max_position:
        raise UserError(
            f"--max-model-len {wanted}: the model was made for {spec.max_position} positions{_beyond(spec)};"
            f" the largest is {fits}"
        )
    if wanted > fits:
        raise UserError(
            f"--max-model-len {wanted}: the KV pool holds {pool_tokens} tokens; the largest that fits is {fits},"
            " or give more --kv-cache-memory"
        )
    return wanted


def _cut(settings: Settings, spec: ModelSpec, length: int) -> tuple[str, ...]:
    if settings.max_model_len != "auto" or length == spec.max_position:
        return ()
    return (
        f"the KV cache holds {length} tokens, so that is the most a prompt with its answer may have, of the"
        f" {spec.max_position} that the model was made for; give more --kv-cache-memory for more",
    )


def _beyond(spec: ModelSpec) -> str:
    is_dynamic = any(isinstance(layer.rotary.scaling, Dynamic) for layer in spec.layers)
    return ", and its dynamic rotary scaling beyond them is not supported" if is_dynamic else ""


def _step_tokens(settings: Settings, length: int, default: int) -> tuple[int, int, tuple[str, ...]]:
    """(max_model_len, max_num_batched_tokens, notes): without chunks a whole prompt must fit into one step."""
    tokens = settings.max_num_batched_tokens
    if tokens == "auto":
        return length, default if settings.enable_chunked_prefill else max(default, length), ()
    if settings.enable_chunked_prefill or length <= tokens:
        return length, tokens, ()
    if settings.max_model_len != "auto":
        raise UserError(
            f"--max-model-len {length} is over --max-num-batched-tokens {tokens}, and --no-enable-chunked-prefill"
            " wants every prompt in one step; lower the first, raise the second, or leave chunked prefill on"
        )
    return tokens, tokens, (f"--max-num-batched-tokens {tokens} is the most tokens of a prompt too, without chunked prefill",)
