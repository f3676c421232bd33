"""Hub ids, through the library's own client, from a small endpoint on loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from tests.hub_endpoint import Endpoint, Repository, commit_of, endpoint
from tests.server import wait_for
from tpserve import preflight, spellings
from tpserve.checkpoint import hub, source
from tpserve.settings import Settings, UserError

MODEL = "org/tiny"
PLAIN = {
    "config.json": b"{}",
    "generation_config.json": b'{"eos_token_id": 1}',
    "tokenizer.json": b'{"a": 1}',
    "tokenizer_config.json": b'{"b": 1}',
    "chat_template.jinja": b"{{ messages }}",
}
UNUSED = {
    "README.md": b"# model",
    "pytorch_model.bin": b"pickle",
    "tokenizer.model": b"pieces",
    "vocab.json": b"{ }",
    "consolidated.safetensors": b"again",
    "onnx/model.onnx": b"graph",
    "sub/model.safetensors": b"other",
}
WEIGHTS = b"0123456789" * 1000


def repository(files: dict[str, bytes]) -> Repository:
    return Repository({commit_of(1): files}, {"main": commit_of(1)})


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Endpoint]:
    """The endpoint with a model on it, as this process sees it; the cache is empty, and nobody has logged in."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    with endpoint() as running:
        running.repositories[MODEL] = repository(PLAIN | UNUSED | {"model.safetensors": WEIGHTS})
        for name, value in {
            "ENDPOINT": running.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": running.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_OFFLINE": False,
            "AGENT_HARNESSES_PATH": str(tmp_path / "harnesses"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        yield running


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the endpoint's address one where nobody listens."""

    def leave() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound, so nobody else's; not listening
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")

    return leave


def fetch(model: str = MODEL, **settings: object) -> Path:
    """Both stages; the folder."""
    folder, fetch_weights = hub.describe(Settings(model=model, **settings))  # type: ignore[arg-type]
    fetch_weights()
    return folder


def refusal(model: str = MODEL, **settings: object) -> str:
    with pytest.raises(UserError) as error:
        fetch(model, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# What is fetched.


def test_config_and_tokenizer_come_first_and_weights_when_they_are_wanted(there: Endpoint, tmp_path: Path) -> None:
    folder, fetch_weights = hub.describe(Settings(model=MODEL))
    assert folder == tmp_path / "cache/models--org--tiny/snapshots" / commit_of(1)
    assert names(folder) == set(PLAIN)
    fetch_weights()
    assert names(folder) == {*PLAIN, "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_second_start_asks_once_and_fetches_nothing(there: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    fetch()
    assert "fetching" in capsys.readouterr().err
    sent = list(there.sent)
    assert len(sent) == len(set(sent)) == len(PLAIN) + 1
    fetch()
    assert there.sent == sent
    assert capsys.readouterr() == ("", "")


def test_model_goes_by_its_id(there: Endpoint) -> None:
    found = source.describe(Settings(model=MODEL))
    assert (found.name, found.path.name) == (MODEL, commit_of(1))


def test_download_dir_is_where_files_go(there: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch(download_dir="~/elsewhere").is_relative_to(tmp_path / "elsewhere")
    assert not (tmp_path / "cache").exists()


def test_index_brings_the_shards_it_names_and_no_others(there: Endpoint) -> None:
    shards = {"a-1.safetensors": b"one", "a-2.safetensors": b"two"}
    index = json.dumps({"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors", "z": "a-1.safetensors"}})
    files = PLAIN | shards | {"model.safetensors.index.json": index.encode(), "other.safetensors": b"old"}
    there.repositories[MODEL] = repository(files)
    assert names(fetch()) == {*PLAIN, *shards, "model.safetensors.index.json"}


def test_single_file_is_all_that_is_fetched_though_there_is_an_index(there: Endpoint) -> None:
    index = json.dumps({"weight_map": {"x": "a-1.safetensors"}}).encode()
    shards = {"a-1.safetensors": b"one", "model.safetensors.index.json": index, "model.safetensors": WEIGHTS}
    there.repositories[MODEL] = repository(PLAIN | shards)
    assert names(fetch()) == {*PLAIN, "model.safetensors.index.json", "model.safetensors"}


def test_index_that_names_what_is_not_there_is_refused_before_any_shard_is_fetched(there: Endpoint) -> None:
    index = json.dumps({"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors"}}).encode()
    there.repositories[MODEL] = repository(PLAIN | {"a-1.safetensors": b"one", "model.safetensors.index.json": index})
    assert f"{there.url}/{MODEL} has no a-2.safetensors" in refusal()
    assert "a-1.safetensors" not in there.sent


def test_files_of_other_names_are_taken_where_there_is_no_index(there: Endpoint) -> None:
    there.repositories[MODEL] = repository(PLAIN | UNUSED | {"weights.safetensors": b"w"})
    assert names(fetch()) == {*PLAIN, "weights.safetensors"}


def test_other_tokenizer_files_are_fetched_without_a_tokenizer_json(there: Endpoint) -> None:
    others = {"tokenizer.model": b"pieces", "vocab.json": b"{}", "merges.txt": b"a b"}
    there.repositories[MODEL] = repository({"config.json": b"{}", "model.safetensors": WEIGHTS} | others)
    folder, _ = hub.describe(Settings(model=MODEL))
    assert names(folder) == {"config.json", *others}


def test_dummy_weights_need_none(there: Endpoint) -> None:
    there.repositories[MODEL] = repository(PLAIN)
    folder, _ = hub.describe(Settings(model=MODEL, load_format="dummy"))
    assert names(folder) == set(PLAIN)


# Revisions.


def two_commits() -> Repository:
    """Every file of the second commit differs from that of the first."""
    first = PLAIN | {"model.safetensors": WEIGHTS}
    second = {name: content + b" " for name, content in first.items()}
    return Repository({commit_of(1): first, commit_of(2): second}, {"main": commit_of(2), "v1.0": commit_of(1)})


@pytest.mark.parametrize("revision", ["v1.0", commit_of(1)])
def test_revision_is_the_one_that_is_asked_for(there: Endpoint, revision: str) -> None:
    there.repositories[MODEL] = two_commits()
    folder = fetch(revision=revision)
    assert folder.name == commit_of(1)
    assert (folder / "config.json").read_bytes() == PLAIN["config.json"]
    assert fetch().name == commit_of(2)


def moves(there: Endpoint) -> Callable[[], None]:
    def move() -> None:
        there.repositories[MODEL].revisions["main"] = commit_of(2)

    return move


def test_revision_that_moves_between_config_and_weights_is_not_mixed(there: Endpoint) -> None:
    there.repositories[MODEL] = two_commits()
    there.repositories[MODEL].revisions["main"] = commit_of(1)
    folder, fetch_weights = hub.describe(Settings(model=MODEL))
    moves(there)()
    fetch_weights()
    assert (folder.name, (folder / "model.safetensors").read_bytes()) == (commit_of(1), WEIGHTS)


def test_revision_that_moves_while_config_is_fetched_is_fetched_as_it_is_then(
    there: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    there.repositories[MODEL] = two_commits()
    there.repositories[MODEL].revisions["main"] = commit_of(1)
    there.after_listing = moves(there)
    folder = fetch()
    assert "again" not in capsys.readouterr().err
    assert folder.name == commit_of(2)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == there.repositories[MODEL].commits[commit_of(2)]


def test_revision_of_what_is_no_hub_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--revision v1: only a Hub id has revisions"):
        source.describe(Settings(model=str(tmp_path), revision="v1"))


# Access.


@pytest.mark.parametrize("access", ["gated", "private"])
def test_token_opens_what_it_may_and_does_not_go_to_the_storage(
    there: Endpoint, access: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.repositories[MODEL].access = access
    monkeypatch.setenv("HF_TOKEN", there.token)
    fetch()
    sent = {bool(re.match("/storage/", one.path)): one.headers.get("authorization") for one in there.requests}
    assert sent == {False: f"Bearer {there.token}", True: None}


@pytest.mark.parametrize(
    ("change", "token", "expected"),
    [
        ({"access": "gated"}, "", ["is gated", "ask for access", "HF_TOKEN", "hf auth login"]),
        ({"access": "private"}, "", ["no such folder", "has no such repository or keeps it private", "HF_TOKEN"]),
        ({"access": "public"}, "hf_wrong", ["refuses (401", "HF_TOKEN"]),
        ({"access": "public"}, "hf_ü", ["HF_TOKEN is no token"]),
    ],
)
def test_refused_access_says_what_to_do_and_no_token(
    there: Endpoint, change: dict[str, str], token: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there.repositories[MODEL].access = change["access"]
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    text = refusal()
    assert [part for part in expected if part not in text] == []
    assert not token or token not in text


def test_token_where_others_could_read_it_is_refused() -> None:
    assert "set HF_TOKEN" in str(spellings.unknown("--hf-token"))


def test_repository_and_revision_that_are_not_there_are_named(there: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("org/none").startswith(f"--model org/none: no such folder, and {there.url} has no such repository")
    monkeypatch.setenv("HF_TOKEN", there.token)
    assert refusal("org/none").startswith(f"--model org/none: no such folder, and {there.url} has no such repository")
    assert f"{there.url}/{MODEL} has no branch, tag or commit v9; correct --revision" in refusal(revision="v9")


@pytest.mark.parametrize("model", ["./models/tiny", "/models/tiny", "a/b/c", "two words", "a--b", "org/", "~nobody/x", "../x"])
def test_what_cannot_be_an_id_is_a_folder_that_is_not_there(
    there: Endpoint, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # beside which nothing lies
    with pytest.raises(UserError, match=f"^--model {re.escape(model)}: no such folder; give .* Hub id such as org/name$"):
        source.describe(Settings(model=model))
    assert there.sent == []


# What a repository has not.


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (PLAIN | {"pytorch_model.bin": b"x"}, ["pytorch_model.bin", "only safetensors and GGUF are read", "save_pretrained"]),
        ({"b.gguf": b"x", "a.gguf": b"x"}, ["as GGUF (a.gguf and 1 more)", "hf download org/tiny a.gguf", "--model FILE.gguf"]),
        (PLAIN, ["has no model.safetensors"]),
        ({"model.safetensors": b"x", "tokenizer.json": b"{}"}, ["has no config.json"]),
        ({"model.safetensors": b"x", "config.json": b"{}"}, ["has no tokenizer.json"]),
    ],
)
def test_repository_that_cannot_be_served_is_refused_before_anything_is_fetched(
    there: Endpoint, files: dict[str, bytes], expected: list[str]
) -> None:
    there.repositories[MODEL] = repository(files)
    text = refusal()
    assert text.startswith(f"--model {MODEL}: ")
    assert [part for part in expected if part not in text] == []
    assert there.sent == []


def test_architecture_that_is_not_supported_is_refused_before_weights_are_fetched(there: Endpoint) -> None:
    there.repositories[MODEL].commits[commit_of(1)]["config.json"] = b'{"architectures": ["NoSuchForCausalLM"]}'
    with pytest.raises(UserError, match="NoSuchForCausalLM"):
        preflight.resolve(Settings(model=MODEL))
    assert "model.safetensors" not in there.sent


# Without the Hub.


def test_unreachable_hub_is_named_where_there_is_no_copy(there: Endpoint, unreachable: Callable[[], None]) -> None:
    unreachable()
    text = refusal()
    assert f"no such folder; and as a Hub id: cannot reach {constants.ENDPOINT} (" in text
    assert f"no copy of it is in {constants.HF_HUB_CACHE}" in text


@pytest.mark.parametrize("revision", [None, "v1.0", commit_of(1)])
def test_copy_is_used_and_said_so_where_the_hub_cannot_be_reached(
    there: Endpoint, unreachable: Callable[[], None], capsys: pytest.CaptureFixture[str], revision: str | None
) -> None:
    there.repositories[MODEL].revisions["v1.0"] = commit_of(1)
    folder = fetch(revision=revision)
    capsys.readouterr()
    unreachable()
    assert fetch(revision=revision) == folder
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith(f"{MODEL}: cannot reach {constants.ENDPOINT} (")
    assert line.endswith(f"using the copy in {folder}")


def test_copy_is_used_where_the_hub_is_down(there: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fetch()
    there.status = 503
    assert fetch() == folder
    assert f"{there.url} answers 503; using the copy" in capsys.readouterr().err


def test_offline_mode_uses_the_copy_quietly_and_asks_nothing(
    there: Endpoint, offline: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch()
    asked = len(there.requests)
    capsys.readouterr()
    offline()
    assert fetch() == folder
    assert (len(there.requests), capsys.readouterr()) == (asked, ("", ""))


def test_offline_mode_without_a_copy_is_refused(there: Endpoint, offline: Callable[[], None]) -> None:
    offline()
    assert "HF_HUB_OFFLINE is set, and no copy of it is in" in refusal()
    assert there.requests == []


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json", "tokenizer.json"])
def test_incomplete_copy_is_refused_by_the_file_it_lacks(there: Endpoint, offline: Callable[[], None], missing: str) -> None:
    folder = fetch()
    (folder / missing).unlink()
    offline()
    assert ("no copy of it" if missing == "config.json" else f"lacks {missing}; start once with access") in refusal()


def test_copy_that_lacks_a_shard_is_refused_by_its_name(there: Endpoint, offline: Callable[[], None]) -> None:
    index = json.dumps({"weight_map": {"x": "a-1.safetensors"}}).encode()
    there.repositories[MODEL] = repository(PLAIN | {"a-1.safetensors": b"one", "model.safetensors.index.json": index})
    hub.describe(Settings(model=MODEL))
    offline()
    assert "lacks a-1.safetensors" in refusal()


@pytest.mark.parametrize("page", [b"<html>log in to the guest network</html>", b"{}", b"[]"])
def test_what_does_not_answer_as_a_hub_is_named(there: Endpoint, page: bytes) -> None:
    there.page = page
    assert f"{there.url} does not answer as a Hub does" in refusal()


def test_rate_limit_is_named(there: Endpoint) -> None:
    there.status = 429
    assert f"{there.url} answers 429" in refusal()


def test_endpoint_that_never_answers_is_given_up(there: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
        assert f"cannot reach {constants.ENDPOINT} (" in refusal()


# Downloads that go wrong.


def test_broken_transfer_goes_on_where_it_broke_off(there: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what comes after the last whole chunk is lost
    there.cut_bytes = 4000
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [one.headers.get("range") for one in there.requests if one.path.startswith("/storage/")]
    assert ranges == [None, "bytes=4000-"]


def test_short_file_is_refused_and_not_kept(there: Endpoint) -> None:
    there.missing_bytes = 1
    assert "broke off (Consistency check failed" in refusal()
    there.missing_bytes = 0
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_file_that_is_not_whole_in_the_cache_is_fetched_again(
    there: Endpoint, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    content = there.repositories[MODEL].commits[commit_of(1)][name]
    path = fetch() / name
    with path.open("r+b") as file:
        file.truncate(1)
    capsys.readouterr()
    assert (fetch() / name).read_bytes() == content
    assert f"{path} has 1 of {len(content)} bytes; fetching it again" in capsys.readouterr().err


def test_weights_that_do_not_fit_the_disk_are_refused_before_they_are_fetched(
    there: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9999))
    text = refusal()
    assert f"its weights need 0.00 GiB (10000 bytes), but {constants.HF_HUB_CACHE} has" in text
    assert "--download-dir" in text
    assert "model.safetensors" not in there.sent


def test_weights_that_another_commit_has_brought_need_no_room(there: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch()
    there.repositories[MODEL].commits[commit_of(2)] = PLAIN | {"model.safetensors": WEIGHTS, "config.json": b"{ }"}
    there.repositories[MODEL].revisions["main"] = commit_of(2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS
    assert there.sent.count("model.safetensors") == 1


def test_cache_that_cannot_be_written_is_named(there: Endpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert f"cannot write {tmp_path}/file" in refusal(download_dir=str(tmp_path / "file"))


# Processes.

FETCH = """
import sys
from tpserve.checkpoint import hub
from tpserve.settings import Settings
folder, fetch_weights = hub.describe(Settings(model="org/tiny"))
fetch_weights()
assert "torch" not in sys.modules
print((folder / "model.safetensors").stat().st_size)
"""


def environment(there: Endpoint, tmp_path: Path) -> dict[str, str]:
    return os.environ | {"HF_ENDPOINT": there.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_CACHE": str(tmp_path / "cache")}


def start(command: list[str], there: Endpoint, tmp_path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment(there, tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def listings(there: Endpoint) -> int:
    return sum(one.path.startswith("/api/models/") for one in there.requests)


def test_processes_that_start_at_once_share_one_download(there: Endpoint, tmp_path: Path) -> None:
    # The first body is not sent before both are there to want it.
    there.before_body = lambda: wait_for(lambda: listings(there) == 2, 60, "second process")
    processes = [start(["-c", FETCH], there, tmp_path) for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, f"{len(WEIGHTS)}\n"), err
    assert sorted(there.sent) == sorted({*PLAIN, "model.safetensors"})


def test_interrupted_download_ends_at_once_and_leaves_nothing_half_made(
    there: Endpoint, tiny_model: Path, tmp_path: Path
) -> None:
    there.repositories[MODEL] = Repository.of_folder(tiny_model)
    go_on, arrived = threading.Event(), threading.Event()
    there.before_body = lambda: (arrived.set(), go_on.wait(60))
    process = start(["-m", "tpserve.cli", "launch", "--model", MODEL, "--port", "0"], there, tmp_path)
    assert arrived.wait(60)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    go_on.set()
    (line,) = err.strip().splitlines()
    assert (process.returncode, out) == (130, "")
    assert line.startswith(f"{MODEL}: fetching ")
    assert list(tmp_path.rglob("*.incomplete")) == []
    already = list(there.sent)
    fetch()
    assert there.sent == [*already, "model.safetensors"]
