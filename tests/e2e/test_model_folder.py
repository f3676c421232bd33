"""What a model's folder says of generating is done, and what it lacks is said: a server at TP 2 of one such folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.reference import Reference, references
from tests.server import Server
from tests.tiny import TEMPLATE

DEFAULTS = {"temperature": 0.3, "top_p": 0.8, "repetition_penalty": 1.2}
PLAIN = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
SEEDED = {"prompt": [5, 6, 7], "max_tokens": 24, "seed": 3, "ignore_eos": True}
END_AT = 5  # of the continuations, where their end ids stand


@dataclass
class Folder:
    path: Path
    greedy: list[Reference]
    end_ids: list[int]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Two end ids, in generation_config.json alone, with defaults of sampling; no chat template."""
    path = shutil.copytree(tiny_model, tmp_path_factory.mktemp("folder") / "tiny")
    greedy = references(path, [(12, 16), (20, 16)])
    end_ids = [reference.continuation[END_AT] for reference in greedy]
    config = json.loads((path / "config.json").read_text())
    del config["eos_token_id"]
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text("{}")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids, **DEFAULTS}))
    return Folder(path, greedy, end_ids)


@pytest.fixture(scope="module")
def server(folder: Folder) -> Iterator[Server]:
    """Without the native kernels, on which the other servers run."""
    plain = "--dtype", "float32", "--kv-cache-memory", "64MiB", "--kernels", "torch"
    with Server("--model", folder.path, "--tp", "2", *plain) as started:
        yield started


def test_generation_ends_at_each_id_of_the_generation_config_or_at_none_with_ignore_eos(server: Server, folder: Folder) -> None:
    assert len(set(folder.end_ids)) == 2
    for reference in folder.greedy:
        assert not set(reference.continuation[:END_AT]) & set(folder.end_ids)
        body = {"prompt": reference.prompt, "max_tokens": 16, **PLAIN, "temperature": 0}
        ended = server.complete(**body)
        assert ended["choices"][0]["finish_reason"] == "stop"
        assert ended["usage"]["completion_tokens"] == END_AT + 1
        ignored = server.complete(**body, ignore_eos=True)
        assert ignored["choices"][0]["finish_reason"] == "length"
        assert ignored["usage"]["completion_tokens"] == 16


def test_defaults_of_the_generation_config_are_shown_and_hold_unless_a_request_says_otherwise(
    server: Server, tiny_server: Server
) -> None:
    assert "requests that leave them out get temperature 0.3, top_p 0.8, repetition_penalty 1.2" in server.log
    default = server.text(**SEEDED)
    assert default == server.text(**SEEDED, **dict.fromkeys(DEFAULTS)) == tiny_server.text(**SEEDED, **DEFAULTS)
    for name in DEFAULTS:
        assert server.text(**SEEDED, **{name: PLAIN[name]}) == tiny_server.text(**SEEDED, **{**DEFAULTS, name: PLAIN[name]})
    assert default != server.text(**SEEDED, **PLAIN) == tiny_server.text(**SEEDED)


def chat(server: Server) -> tuple[int, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    return answer.status_code, answer.json()


def test_model_without_a_chat_template_says_so_and_completes_and_refuses_chats_with_the_remedy(server: Server) -> None:
    (line,) = [line for line in server.stderr if "no chat template" in line]
    assert "--chat-template FILE" in line
    assert server.complete(**SEEDED)["usage"]["completion_tokens"] == 24
    status, answer = chat(server)
    assert status == 400
    assert "--chat-template FILE" in answer["error"]["message"]


@pytest.mark.slow
def test_chat_template_of_a_file_is_the_remedy(folder: Folder, tmp_path: Path, tiny_server: Server) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    with Server("--model", folder.path, "--chat-template", tmp_path / "chat.jinja", "--dtype", "float32") as server:
        assert "no chat template" not in server.log
        status, answer = chat(server)
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == len("user: hi\nassistant:")
