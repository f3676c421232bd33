"""Values as they are given, by a flag, a variable or a config file, and how they become checked settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_origin

from pydantic import ValidationError

from tpserve import spellings
from tpserve.settings import SHOWN_SECRET, Settings, UserError, explain

_PREFIX = "TPSERVE_"  # a setting's variable is this and its name in capitals: TPSERVE_MAX_MODEL_LEN
CONFIG = "TPSERVE_CONFIG"
_OTHERS = {CONFIG, "TPSERVE_CACHE"}  # read elsewhere
_VARIABLES = {_PREFIX + key.upper(): field for key, field in spellings.FIELDS.items()}


@dataclass(frozen=True)
class Given:
    """A value before it is checked, and where it comes from."""

    value: Any
    source: str  # --tp, TPSERVE_TP, run.yaml:3
    written: str  # source and value as they stand there, for error messages


def takes_several(field: str) -> bool:
    """Whether the setting is a list of values."""
    return get_origin(Settings.model_fields[field].annotation) is tuple


def shown(field: str, text: str) -> str:
    """A value's text as it may be repeated."""
    return SHOWN_SECRET if spellings.FLAGS[field].is_secret else text


def environment(variables: Mapping[str, str]) -> dict[str, Given]:
    """The settings among the variables, by field; an empty variable sets nothing.

    Raises UserError for one that would be ignored: a misspelt variable is as much of a mistake as a misspelt flag.
    """
    given: dict[str, Given] = {}
    for name in sorted(set(variables) - _OTHERS):
        if not name.startswith(_PREFIX):
            continue
        if name not in _VARIABLES:
            raise spellings.unknown(name, _VARIABLES, cutoff=0.8)  # they all begin alike
        field, value = _VARIABLES[name], variables[name]
        if not value:
            continue
        if field in given:
            raise UserError(f"{given[field].source} and {name} are the same setting; unset one of them")
        given[field] = Given(value.split() if takes_several(field) else value, name, f"{name}={shown(field, value)}")
    return given


def check(given: Mapping[str, Given]) -> Settings:
    """Raises UserError that says where the first wrong value was given."""
    try:
        return Settings.model_validate({field: one.value for field, one in given.items()})
    except ValidationError as error:
        field, wants = explain(error)
        raise UserError(f"{given[field].written}: {wants}") from None
