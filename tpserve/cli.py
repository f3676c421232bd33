"""The command `tpserve`. Its options are made from the fields of `Settings`; click reads them and the environment."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tpserve import __version__, log, preflight
from tpserve.listen import listen
from tpserve.settings import Flag, Settings, UserError, explain

_ENVIRONMENT = "TPSERVE_"  # a flag's variable is this and its name in capitals: TPSERVE_MAX_MODEL_LEN
_OTHER_VARIABLES = {"TPSERVE_CACHE"}  # read elsewhere
_NOTES = "tpserve.notes"
_HELP = {"help_option_names": ["-h", "--help"]}

# Flags of other engines whose absence changes nothing here, and what they take: "switch", "any" value, or only that value.
_NEUTRAL = {
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
_NOT_BUILT = (
    "--api-key", "--chat-template", "--config", "--cpu-offload-gb", "--download-dir", "--enable-auto-tool-choice",
    "--enable-expert-parallel", "--enable-lora", "--generation-config", "--hf-overrides", "--lora-modules",
    "--max-logprobs", "--quantization", "--reasoning-parser", "--revision", "--rope-scaling", "--rope-theta",
    "--root-path", "--speculative-config", "--ssl-certfile", "--ssl-keyfile", "--tokenizer", "--tool-call-parser",
)  # fmt: skip


def main() -> int:
    """Entry point of `tpserve`. Returns the exit status; a user's mistake is one line on stderr, and 2."""
    _open_standard_streams()
    try:
        return int(app.main(prog_name="tpserve", standalone_mode=False) or 0)
    except click.NoSuchOption as error:
        if error.option_name in _NOT_BUILT:
            return _refuse(f"{error.option_name} is not supported yet")
        nearest = get_close_matches(error.option_name, error.possibilities or (), 1)
        meant = f"; did you mean {nearest[0]}?" if nearest else "; tpserve launch --help lists the options"
        return _refuse(f"no such option: {error.option_name}{meant}")
    except click.UsageError as error:
        hint = "" if error.ctx is None or error.ctx.info_name == "launch" else " The command is: tpserve launch --model MODEL"
        return _refuse(error.format_message() + hint)
    except click.ClickException as error:
        return _refuse(error.format_message())
    except click.Abort:
        return 130


def _open_standard_streams() -> None:
    """Fill what the caller closed: else another descriptor would become a child's stdin, stdout or stderr."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")


def _refuse(text: str) -> int:
    print("tpserve: error:", " ".join(text.split()), file=sys.stderr)
    return 2


@click.group(no_args_is_help=False, context_settings=_HELP)
@click.version_option(__version__, prog_name="tpserve")
def app() -> None:
    """Serve a language model with N tensor-parallel worker processes."""


def _launch(**values: Any) -> int:
    """Serve a model over HTTP until a signal ends it.

    An option can also come from the environment: TPSERVE_ and its name in capitals, such as TPSERVE_MAX_MODEL_LEN.
    Flags win.
    """
    context = click.get_current_context()
    given = {name: value for name, value in values.items() if _source(name) is not ParameterSource.DEFAULT}
    try:
        _check_environment()
        return _serve(_settings(given), context.meta.get(_NOTES, []))
    except UserError as error:
        if given.get("debug"):
            traceback.print_exc()
        raise click.ClickException(str(error)) from error


def _serve(settings: Settings, notes: list[str]) -> int:
    deployment = preflight.resolve(settings)
    listening = listen(settings.host, settings.port)
    # Only now, so that a refusal is one line and comes quickly.
    from launcher.supervise import supervise
    from launcher.timeline import Timeline

    logger = log.setup("launcher", settings.log_level)
    for note in (*notes, *deployment.notes):
        logger.warning("%s", note)
    try:
        return supervise(deployment, listening, Timeline())
    except OSError as error:  # no room, no descriptors, no processes left
        raise UserError(f"cannot run a server on this machine: {error}") from error


def _settings(given: dict[str, Any]) -> Settings:
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        field, wants = explain(error)
        value = shlex.join(given[field]) if isinstance(given[field], tuple) else shlex.quote(str(given[field]))
        if _source(field) is ParameterSource.ENVIRONMENT:
            raise UserError(f"{_variable(field)}={value}: {wants}") from None
        raise UserError(f"{_flag(Settings.model_fields[field]).names[0]} {value}: {wants}") from None


def _check_environment() -> None:
    """Refuse variables that would be ignored: a misspelt one is as much of a mistake as a misspelt flag."""
    known = {name for field in Settings.model_fields for name in _variables(_flag(Settings.model_fields[field]))}
    for name in sorted(set(os.environ) - known - _OTHER_VARIABLES):
        if name.startswith(_ENVIRONMENT):
            nearest = get_close_matches(name, known, 1, cutoff=0.8)
            raise UserError(f"no such setting: {name}" + (f"; did you mean {nearest[0]}?" if nearest else "; unset it"))


def _variables(flag: Flag) -> list[str]:
    return [_ENVIRONMENT + name.lstrip("-").replace("-", "_").upper() for name in flag.names if name.startswith("--")]


def _variable(field: str) -> str:
    """The variable that the field's value came from."""
    return next(name for name in _variables(_flag(Settings.model_fields[field])) if name in os.environ)


def _source(name: str) -> ParameterSource | None:
    return click.get_current_context().get_parameter_source(name)


class _LaunchCommand(click.Command):
    """Takes several values after one flag, as in `--served-model-name a b`, by repeating the flag for click."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        repeated: list[str] = []
        flag = ""
        for arg in args:
            if arg.startswith("-"):
                flag = arg if _dashes(arg) in several else ""
            elif flag and repeated[-1] != flag:
                repeated.append(flag)
            repeated.append(arg)
        return super().parse_args(ctx, repeated)


def _dashes(name: str) -> str:
    """`--max_num_seqs` is `--max-num-seqs`."""
    return name.replace("_", "-")


def _flag(field: FieldInfo) -> Flag:
    return next(detail for detail in field.metadata if isinstance(detail, Flag))


def _options() -> Iterator[click.Option]:
    for name, field in Settings.model_fields.items():
        yield _option(name, field)
    for names, takes in _NEUTRAL.items():
        yield _neutral_option(names, takes)


def _option(name: str, field: FieldInfo) -> click.Option:
    """Values are left as strings, for `Settings` to check."""
    flag = _flag(field)
    text = str(field.description)
    if field.default not in (None, (), ""):
        text += f"  [{field.default}]" if field.annotation is not bool else f"  [{'on' if field.default else 'off'}]"
    if field.annotation is bool:
        spelled = [f"{n}/--no-{n[2:]}" for n in flag.names]
        return click.Option([name, *spelled], default=None, help=text, hidden=flag.hidden, envvar=_variables(flag))
    return click.Option(
        [name, *flag.names],
        type=str,
        multiple=get_origin(field.annotation) is tuple,
        metavar=_metavar(field.annotation),
        help=text,
        hidden=flag.hidden,
        envvar=_variables(flag),
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


def _neutral_option(names: tuple[str, ...], takes: str) -> click.Option:
    def check(context: click.Context, _: click.Parameter, value: str | bool | None) -> None:
        if not value:
            return
        if takes in ("switch", "any"):
            context.meta.setdefault(_NOTES, []).append(f"{names[0]} has no effect here")
        elif value != takes:
            raise click.UsageError(f"{names[0]} {value} is not supported yet, only {takes}")

    return click.Option(list(names), is_flag=takes == "switch", callback=check, expose_value=False, hidden=True)


app.add_command(
    _LaunchCommand(
        "launch",
        callback=_launch,
        params=list(_options()),
        help=_launch.__doc__,
        context_settings=_HELP | {"token_normalize_func": _dashes},
    )
)

if __name__ == "__main__":
    sys.exit(main())
