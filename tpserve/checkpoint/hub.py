"""Hub ids: a model of the Hugging Face Hub, or of what speaks like it, in the cache folder of the Hub's own library.

HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and HF_HUB_OFFLINE mean what they mean to `huggingface_hub`, whose file locks
see to it that servers which start at once share one download. Files come one after the other, in this thread: that
way Ctrl-C ends a download at once, and hf_xet, where the Hub has it, fetches the parts of a file side by side.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tpserve import __version__
from tpserve.checkpoint import headers
from tpserve.memory import show
from tpserve.settings import Settings, UserError

_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_BESIDE_CONFIG = (
    "generation_config.json", headers.INDEX, _TOKENIZER, "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt")
_TOKEN = "set HF_TOKEN to a token of yours that may read it, or run hf auth login"


@dataclass(frozen=True)
class _File:
    size_bytes: int | None  # as the Hub says
    blob: str | None = None  # what the cache keeps a large file under: its SHA-256


@dataclass(frozen=True)
class _Listing:
    """A repository's files at one commit, by name; those in the cache if the Hub is `away`."""

    commit: str
    files: Mapping[str, _File]
    away: str = ""  # why the Hub was not asked


def describe(settings: Settings) -> tuple[Path, Callable[[], Path]]:
    """The folder of the model's files but for its weights, and what brings those: the safetensors of the same commit.

    Without the Hub it is the copy in the cache. Raises UserError if there is no such repository, if it may not be
    read, if it has not what is needed, or if it cannot be had.
    """
    with _one_line(settings):
        listing = _listing(settings)
        for name in _first_files(settings, listing):
            _fetch(settings, listing, name)
        # Last, as a sign that the others are there; and by the revision's name, which the library then keeps
        # for the day when the Hub is away.
        folder = _download(settings, _CONFIG, listing.commit if listing.away else settings.revision).parent
        if folder.name == listing.commit:
            _fetch(settings, listing, _CONFIG)
            return folder, partial(_fetch_weights, settings, listing, folder)
    return describe(settings)  # the revision has moved meanwhile


def _listing(settings: Settings) -> _Listing:
    try:
        return _ask(settings)
    except OfflineModeIsEnabled:
        return _cached(settings, "HF_HUB_OFFLINE is set")
    except httpx2.TransportError as error:
        return _cached(settings, f"cannot reach {constants.ENDPOINT} ({str(error) or type(error).__name__})")
    except HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise
        return _cached(settings, f"{constants.ENDPOINT} answers {error.response.status_code}")


def _ask(settings: Settings) -> _Listing:
    """The one question that is asked each time, so the one that finds out whether the Hub is there."""
    try:
        info = _api().model_info(
            settings.model, revision=settings.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        if info.sha is None or info.siblings is None:
            raise LookupError("no commit")
    except HfHubHTTPError:  # some are ValueErrors too
        raise
    except HFValidationError:
        raise UserError(
            f"--model {settings.model}: no such folder; give a model folder, or a Hub id such as org/name"
        ) from None
    except UnicodeEncodeError as error:  # of a header
        raise UserError("HF_TOKEN is no token: it has letters beyond ASCII; set it again") from error
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"--model {settings.model}: {constants.ENDPOINT} does not answer as a Hub does ({type(error).__name__}: {error});"
            " correct HF_ENDPOINT, or look for a proxy that answers in its place"
        ) from error
    return _Listing(info.sha, {one.rfilename: _File(one.size, one.lfs.sha256 if one.lfs else None) for one in info.siblings})


def _cached(settings: Settings, away: str) -> _Listing:
    """What the cache has of the revision as it was when it was last asked for."""
    config = try_to_load_from_cache(settings.model, _CONFIG, cache_dir=_cache(settings), revision=settings.revision)
    if not isinstance(config, str):
        raise UserError(
            f"--model {settings.model}: no such folder; and as a Hub id: {away}, and no copy of it is in {_cache(settings)};"
            f" correct the path, or start once with access to {constants.ENDPOINT}"
        )
    folder = Path(config).parent
    if not constants.is_offline_mode():
        print(f"{settings.model}: {away}; using the copy in {folder}", file=sys.stderr)
    files = {file.name: _File(file.stat().st_size) for file in folder.iterdir() if file.is_file()}
    return _Listing(folder.name, files, away)


def _first_files(settings: Settings, listing: _Listing) -> list[str]:
    """What to bring before config.json. Raises UserError if the repository is no model that can be served."""
    if settings.load_format != "dummy" and not (headers.INDEX in listing.files or headers.safetensors(listing.files)):
        raise _no_safetensors(settings, listing)
    if _CONFIG not in listing.files:
        raise _lacks(settings, listing, _CONFIG)
    others = () if _TOKENIZER in listing.files else _OTHER_TOKENIZERS
    names = [name for name in (*_BESIDE_CONFIG, *others) if name in listing.files]
    if not {_TOKENIZER, *_OTHER_TOKENIZERS} & set(names):
        raise _lacks(settings, listing, _TOKENIZER)
    return names


def _fetch_weights(settings: Settings, listing: _Listing, folder: Path) -> Path:
    names = headers.weight_files(folder, listing.files)
    for name in names:
        if name not in listing.files:
            raise _lacks(settings, listing, name)
    with _one_line(settings):
        _announce(settings, listing, names, folder)
        for name in names:
            _fetch(settings, listing, name)
    return folder


def _announce(settings: Settings, listing: _Listing, names: list[str], folder: Path) -> None:
    """Say what there is to wait for. Raises UserError if there is no room for it."""
    blobs = folder.parents[1] / "blobs"
    missing = [
        name for name in names if not (folder / name).exists() and not (blobs / (listing.files[name].blob or "-")).exists()
    ]
    if not missing:
        return
    needed_bytes = sum(listing.files[name].size_bytes or 0 for name in missing)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise UserError(
            f"--model {settings.model}: its weights need {show(needed_bytes)}, but {_cache(settings)} has"
            f" {show(free_bytes)} free; make room, or give another folder with --download-dir"
        )
    print(f"{settings.model}: fetching {show(needed_bytes)} of weights from {constants.ENDPOINT}", file=sys.stderr)


def _fetch(settings: Settings, listing: _Listing, name: str) -> None:
    """Bring the file, if it is not in the cache, or not whole."""
    path = _download(settings, name, listing.commit)
    found, expected = path.stat().st_size, listing.files[name].size_bytes
    if expected is not None and found != expected:
        print(f"{path} has {found} of {expected} bytes; fetching it again", file=sys.stderr)
        _download(settings, name, listing.commit, force=True)


def _download(settings: Settings, name: str, revision: str | None, force: bool = False) -> Path:
    cache = _cache(settings)
    return Path(_api().hf_hub_download(settings.model, name, revision=revision, cache_dir=cache, force_download=force))


def _api() -> HfApi:
    return HfApi(library_name="tpserve", library_version=__version__)


def _cache(settings: Settings) -> Path:
    return Path(settings.download_dir or constants.HF_HUB_CACHE).expanduser()


def _lacks(settings: Settings, listing: _Listing, name: str) -> UserError:
    if listing.away:
        return UserError(
            f"--model {settings.model}: {listing.away}, and the copy in {_cache(settings)} lacks {name};"
            f" start once with access to {constants.ENDPOINT}"
        )
    return UserError(
        f"--model {settings.model}: {_page(settings)} has no {name};"
        " give a repository with config.json, tokenizer.json and safetensors"
    )


def _no_safetensors(settings: Settings, listing: _Listing) -> UserError:
    model = settings.model
    ggufs = sorted(name for name in listing.files if name.endswith(".gguf"))
    pickles = sorted(name for name in listing.files if name.endswith((".bin", ".pt", ".pth")))
    if ggufs:
        several = f"{ggufs[0]} and {len(ggufs) - 1} more" if len(ggufs) > 1 else ggufs[0]
        return UserError(
            f"--model {model}: has its weights as GGUF ({several}); fetch one with"
            f" 'hf download {model} {ggufs[0]} --local-dir FOLDER', and give it as --model FILE.gguf"
        )
    if pickles:
        return UserError(
            f"--model {model}: has its weights in {pickles[0]}, but only safetensors and GGUF are read; convert it, where"
            f" you trust it, with AutoModelForCausalLM.from_pretrained('{model}').save_pretrained(FOLDER) of transformers"
        )
    return _lacks(settings, listing, headers.SINGLE)


def _page(settings: Settings) -> str:
    return f"{constants.ENDPOINT}/{settings.model}"


@contextmanager
def _one_line(settings: Settings) -> Iterator[None]:
    """What the library raises, as a UserError."""
    try:
        yield
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        raise UserError(" ".join(f"--model {settings.model}: {_explain(error, settings)}".split())) from error


def _explain(error: Exception, settings: Settings) -> str:
    """What happened and what to do."""
    match error:
        case GatedRepoError():
            return f"{_page(settings)} is gated; ask for access on that page, then {_TOKEN}"
        case RevisionNotFoundError():
            return f"{_page(settings)} has no branch, tag or commit {settings.revision}; correct --revision"
        case HfHubHTTPError() if isinstance(error, RepositoryNotFoundError) or _is_unknown(error):
            return (
                f"no such folder, and {constants.ENDPOINT} has no such repository or keeps it private;"
                f" correct the name, or {_TOKEN}"
            )
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"{constants.ENDPOINT} refuses ({error.response.status_code} {error.server_message or ''}); {_TOKEN}"
        case HfHubHTTPError():
            answer = error.server_message or error.response.reason_phrase
            return f"{constants.ENDPOINT} answers {error.response.status_code} ({answer}); start again later"
        case OSError(strerror=str(reason)):
            where = error.filename or _cache(settings)
            return f"cannot write {where} ({reason}); make room or see to its rights, or give another --download-dir"
        case _:
            cause = error.__cause__ or error
            return f"the download from {constants.ENDPOINT} broke off ({cause}); start again: complete files are kept"


def _is_unknown(error: HfHubHTTPError) -> bool:
    """Whether this may mean that there is no such repository, told by an endpoint that says no more than a status."""
    status = error.response.status_code
    return status == 404 or (status == 401 and "authorization" not in error.response.request.headers)
