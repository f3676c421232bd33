"""The options of `tpserve launch`, made from the fields of `Settings` for click to parse."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click

from tpserve import spellings
from tpserve.settings import Settings
from tpserve.sources import Given, shown, takes_several
from tpserve.spellings import FLAGS

NOTES = "tpserve.notes"  # what there is to tell of other engines' options, in the meta of click's context
_FOREIGN = "tpserve.foreign"  # those options as they are given, until all are parsed


class SettingsCommand(click.Command):
    """Takes several values after one flag, as in `--served-model-name a b`, by repeating the flag for click.

    Options of other engines are judged when all are known: they may refer to the model.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        repeated: list[str] = []
        flag = ""
        for arg in args:
            if arg.startswith("-"):
                flag = arg if dashes(arg) in several else ""
            elif flag and repeated[-1] != flag:
                repeated.append(flag)
            repeated.append(arg)
        rest = super().parse_args(ctx, repeated)
        model = ctx.params.get("model")
        notes = [spellings.foreign_note(flag, value, model) for flag, value in ctx.meta.get(_FOREIGN, [])]
        ctx.meta[NOTES] = [note for note in notes if note]
        return rest


def dashes(name: str) -> str:
    """`--max_num_seqs` is `--max-num-seqs`."""
    return name.replace("_", "-")


def options() -> Iterator[click.Option]:
    """One for each setting, and hidden ones for what other engines have besides."""
    yield from (_option(field) for field in FLAGS)
    yield from (_foreign_option(flags, is_switch) for flags, is_switch in spellings.foreign_flags().items())


def given(values: Mapping[str, Any]) -> dict[str, Given]:
    """The settings among click's values that a flag gave."""
    return {field: _given(field, value) for field, value in values.items() if value not in (None, ())}


def _given(field: str, value: Any) -> Given:
    flag = FLAGS[field].names[0]
    if isinstance(value, bool):
        flag = flag if value else f"--no-{flag[2:]}"
        return Given(value, flag, flag)
    text = shlex.quote(value) if isinstance(value, str) else shlex.join(value)
    return Given(value, flag, f"{flag} {shown(field, text)}")


def _option(name: str) -> click.Option:
    """Values are left as strings, for `Settings` to check."""
    field, flag = Settings.model_fields[name], FLAGS[name]
    text = str(field.description)
    if field.default not in (None, (), ""):
        text += f"  [{field.default}]" if field.annotation is not bool else f"  [{'on' if field.default else 'off'}]"
    if field.annotation is bool:
        spelled = [f"{n}/--no-{n[2:]}" for n in flag.names]
        return click.Option([name, *spelled], default=None, help=text, hidden=flag.hidden)
    return click.Option(
        [name, *flag.names],
        type=str,
        multiple=takes_several(name),
        metavar=_metavar(field.annotation),
        help=text,
        hidden=flag.hidden,
    )


def _metavar(annotation: Any) -> str:
    members = [member for member in get_args(annotation) if member is not NoneType]
    match get_origin(annotation):
        case origin if origin is Literal:
            return "|".join(members)
        case origin if origin is Annotated:
            return _metavar(members[0])
        case origin if origin in (Union, UnionType):
            return "|".join(map(_metavar, members))
        case _:
            return {int: "N", float: "X"}.get(annotation, "TEXT")


def _foreign_option(flags: tuple[str, ...], is_switch: bool) -> click.Option:
    def keep(context: click.Context, _: click.Parameter, value: str | bool | None) -> None:
        context.meta.setdefault(_FOREIGN, []).append((flags[0], value))

    declared = [f"{flags[0]}/--no-{flags[0][2:]}"] if is_switch else flags
    return click.Option([*declared], default=None, callback=keep, expose_value=False, hidden=True)
