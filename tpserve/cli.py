"""The command `tpserve`: what its subcommands do, and how a user's mistake is told."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from tpserve import __version__, config_file, log, options, preflight, sources, spellings
from tpserve.listen import reserve
from tpserve.settings import Settings, UserError

_HELP = {"help_option_names": ["-h", "--help"]}


def main() -> int:
    """Entry point of `tpserve`. Returns the exit status; a user's mistake is one line on stderr, and 2."""
    _open_standard_streams()
    try:
        return int(app.main(prog_name="tpserve", standalone_mode=False) or 0)
    except click.UsageError as error:
        return _refuse(_usage(error))
    except click.ClickException as error:
        return _refuse(error.format_message())
    except UserError as error:
        return _refuse(str(error))
    except click.Abort:
        return 130


def _open_standard_streams() -> None:
    """What the caller closed is open for Python, too."""
    log.fill_standard_streams()
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")


def _usage(error: click.UsageError) -> str:
    if error.ctx is None or error.ctx.command is app:
        return f"{error.message.rstrip('.')}. The commands are: tpserve launch --model MODEL, tpserve chat"
    if isinstance(error, click.NoSuchOption) and error.ctx.command.name == "launch":
        return str(spellings.unknown(error.option_name, error.possibilities or ()))
    return f"{error.format_message().rstrip('.')}; tpserve {error.ctx.command.name} --help lists the options"


def _refuse(text: str) -> int:
    print("tpserve: error:", " ".join(text.split()), file=sys.stderr)
    return 2


@click.group(no_args_is_help=False, context_settings=_HELP)
@click.version_option(__version__, prog_name="tpserve")
def app() -> None:
    """Serve a language model with N tensor-parallel worker processes."""


def _launch(config: tuple[str, ...], show_config: bool, debug: bool | None, **flags: Any) -> int:
    """Serve a model over HTTP until a signal ends it.

    Every setting can also come from a YAML file (--config), under its name with underscores or dashes, and from the
    environment: TPSERVE_ and its name in capitals, such as TPSERVE_MAX_MODEL_LEN. Flags win over the environment, the
    environment over the file. Relative paths are relative to the working directory, also in the file.
    """
    context = click.get_current_context()
    try:
        if context.args:
            first = context.args[0]
            raise UserError(f"unexpected argument {first!r}: a model is given as --model {first}, and a switch takes no value")
        given, notes = _given(config, flags | {"debug": debug})
        settings = sources.check(given)
        debug = settings.debug
        if show_config:
            print(config_file.show(settings, given))
            return 0
        return _serve(settings, [*notes, *context.meta.get(options.NOTES, [])])
    except UserError:
        if debug:
            traceback.print_exc()
        raise


def _given(config: tuple[str, ...], flags: dict[str, Any]) -> tuple[dict[str, sources.Given], list[str]]:
    """(What holds of all that is given, by field; notes of the config file.)"""
    if len(config) > 1:
        raise UserError(f"--config {' '.join(config)}: takes one file")
    variables = sources.environment(os.environ)
    name = config[0] if config else os.environ.get(sources.CONFIG) or None
    file, notes = ({}, []) if name is None else config_file.read(name)
    return file | variables | options.given(flags), notes  # who wins comes last


def _serve(settings: Settings, notes: list[str]) -> int:
    with _signals_unwind(), reserve(settings) as bound:
        deployment = preflight.resolve(settings)
        # Only now, so that a refusal is one line and comes quickly.
        from launcher.supervise import supervise
        from launcher.timeline import Timeline

        logger = log.setup("launcher", settings.log_level, settings.log_format)
        for note in (*notes, *deployment.notes):
            logger.warning("%s", note)
        try:
            return supervise(deployment, bound, Timeline())
        except OSError as error:  # no room, no descriptors, no processes left
            raise UserError(f"cannot run a server on this machine: {error}") from error


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Until the launcher takes them over, signals end this process by way of whoever has to clean up."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # else nohup holds
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)


@app.command(context_settings=_HELP)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the server.")
@click.option("--model", help="One of the models that it serves; default: the first.")
@click.option("--system", default="", metavar="TEXT", help="System message: who the model is to be.")
@click.option("--api-key", envvar="TPSERVE_API_KEY", help="Its key; better in TPSERVE_API_KEY: others see command lines.")
@click.option("--temperature", type=float, help="How free the choice of words is, 0 being none; default: the server's.")
@click.option("--max-tokens", type=int, help="Most tokens of an answer; default: the room left.")
def chat(url: str, model: str | None, system: str, api_key: str | None, **parameters: float | None) -> int:
    """Talk with a model of a running server.

    Where stdin is no terminal, all of it is one question, and stdout gets the answer alone.
    """
    from tpserve.chat.conversation import Conversation
    from tpserve.chat.server import Server
    from tpserve.chat.terminal import talk

    server = Server(url, api_key)
    given = {name: value for name, value in parameters.items() if value is not None}
    return talk(server, Conversation(server.choose(model), system, given))


_CONFIG = click.Option(["--config"], multiple=True, metavar="FILE", help="YAML file of settings, see configs/.")
_SHOW_CONFIG = click.Option(["--show-config"], is_flag=True, help="Print all settings and where each comes from, and end.")

app.add_command(
    options.SettingsCommand(
        "launch",
        callback=_launch,
        params=[*options.options(), _CONFIG, _SHOW_CONFIG],
        help=_launch.__doc__,
        context_settings=_HELP | {"token_normalize_func": options.dashes, "allow_extra_args": True},
    )
)

if __name__ == "__main__":
    sys.exit(main())
