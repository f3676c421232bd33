"""What a model's makers say in generation_config.json of how its ids are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tpserve.checkpoint.folder import read_json
from tpserve.sampling import SamplingDefaults
from tpserve.settings import UserError, explain

FILE = "generation_config.json"
# What changes the output in transformers and not here, each with the values that ask for nothing. Of do_sample: a client
# that leaves the temperature out expects some. (max_length is left out, as it is the model's length by another name.)
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "do_sample": (True,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": ([],),
    "guidance_scale": (1,),
    "max_new_tokens": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
    # From GGUF files:
    "mirostat": (0,),
    "penalty_last_n": (-1,),
    "sequence": (),
    "xtc_probability": (0,),
}


def defaults(folder: Path) -> SamplingDefaults:
    """What requests get that leave it out. Raises UserError for a value that no request may have."""
    content = read_json(folder / FILE, required=False)
    given = {name: content[name] for name in SamplingDefaults.model_fields if content.get(name) is not None}
    try:
        return SamplingDefaults.model_validate(given)
    except ValidationError as error:
        field, wants = explain(error)
        raise UserError(f"{folder / FILE}: {field} is {given[field]!r}: {wants}; correct it or take it out") from None


def notes(folder: Path, found: SamplingDefaults) -> list[str]:
    """What the user should know of the file and of the defaults that were found in it, one line each."""
    content = read_json(folder / FILE, required=False)
    set_here = ", ".join(f"{name} {value}" for name, value in found if name in found.model_fields_set)
    missed = ", ".join(name for name, neutral in _NOT_APPLIED.items() if content.get(name) not in (None, *neutral))
    lines = {
        f"{FILE}: requests that leave them out get {set_here}": set_here,
        f"{FILE}: not supported yet, and so not applied: {missed}": missed,
    }
    return [line for line, names in lines.items() if names]
