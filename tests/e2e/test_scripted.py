"""Answers that no model would give when they are wanted: workers that say what a script has, behind the real server.

Logits of the script's double are closed forms: -(id mod 16) / 4, and 8 of the id that comes next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.server import Server
from tpserve.checkpoint.demo import demo_path
from tpserve.tokenizer import Tokenizer

VOCAB = 49_152
LEAD = 8.0
TEXTS = {
    "emoji": "👩‍👩‍👧‍👦🇩🇪🏳️‍🌈😀🎉",
    "cjk": "你好、世界。今天天气很好。",
    "combining": "e\u0301a\u0308n\u0303 नमस्ते สวัสดี שלום",
    "spaces": " a  b   c    d     e      f\n\n  g\t\th ",
    "special": "before<|im_start|>within<|im_end|>after",
    "breaks": "a\u2028b\u0085c\r\nd\x00e\x7f",
    "stops": "one two three STO STOP four STOPSTOP five",
}
REPEATED = 800  # one id over and over


class Script:
    """A script file, and the prompt that calls each of its answers: prompts differ in length, so none meet."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.entries: dict[str, tuple[list[int], list[int]]] = {}

    def add(self, name: str, answer: list[int]) -> None:
        place = sum(len(ids) + 1 for _, ids in self.entries.values())
        self.entries[name] = [100 + len(self.entries)] * (1 + place), answer

    def text(self, ids: list[int], special: bool = False) -> str:
        hidden = set() if special else self.tokenizer.special_ids
        return b"".join(self.tokenizer.piece(id_) for id_ in ids if id_ not in hidden).decode(errors="replace")


@pytest.fixture(scope="module")
def script() -> Script:
    tokenizer = Tokenizer(demo_path())
    made = Script(tokenizer)
    for name, text in TEXTS.items():
        made.add(name, tokenizer.encode(text, False))
    made.add("bytes", [tokenizer.encode("é😀", False)[0], *tokenizer.encode("x", False)])  # a character that never ends
    made.add("repeated", [REPEATED] * 20)
    made.add("ended", [*tokenizer.encode("The end", False), 2, *tokenizer.encode(" not", False)])
    return made


@pytest.fixture(scope="module")
def server(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("script") / "script.json"
    file.write_text(json.dumps(list(script.entries.values())))
    with Server("--model", "demo", "--tp", "2", "--kv-cache-memory", "64MiB", "--script", file) as running:
        yield running


def ask(server: Server, script: Script, name: str, **body: Any) -> dict[str, Any]:
    """The only choice of the answer to the named prompt: as it is whole, having seen that it is the same streamed."""
    prompt, answer = script.entries[name]
    body = {"model": "demo", "prompt": prompt, "max_tokens": len(answer), "temperature": 0, "ignore_eos": True} | body
    with server.client() as client:
        whole = client.post("/v1/completions", json=body)
        assert whole.status_code == 200, whole.text
        streamed = client.post("/v1/completions", json=body | {"stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.split("\n") if line.startswith("data: {")]
    (choice,) = whole.json()["choices"]
    pieces = [piece for event in events for piece in event["choices"]]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    reasons = [piece["finish_reason"] for piece in pieces]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == choice["finish_reason"]
    if choice["logprobs"] is not None:
        for key, values in choice["logprobs"].items():
            assert [x for piece in pieces for x in piece["logprobs"][key]] == values, key
    result: dict[str, Any] = choice
    return result


@pytest.mark.parametrize("name", [*TEXTS, "bytes"])
def test_text_of_every_kind_is_the_same_streamed_and_whole(server: Server, script: Script, name: str) -> None:
    ids = script.entries[name][1]
    assert ask(server, script, name)["text"] == script.text(ids)
    assert ask(server, script, name, skip_special_tokens=False)["text"] == script.text(ids, special=True)


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [
        ("STOP", "one two three STO "),  # behind a beginning that comes to nothing
        ("STO", "one two three "),
        ([" three S", "never"], "one two"),  # across tokens
        (["four", "o th"], "one tw"),  # the one that is complete first
        ("STOPSTOPS", TEXTS["stops"]),  # almost
        ("five!", TEXTS["stops"]),  # held back at the end, and let go
        ("one", ""),
    ],
    ids=str,
)
def test_stop_strings_end_the_text_before_them(server: Server, script: Script, stop: Any, wanted: str) -> None:
    choice = ask(server, script, "stops", stop=stop)
    assert choice["text"] == wanted
    assert choice["finish_reason"] == ("length" if wanted == TEXTS["stops"] else "stop")


def test_stop_string_is_shown_on_request(server: Server, script: Script) -> None:
    choice = ask(server, script, "stops", stop="STOP", include_stop_str_in_output=True)
    assert choice["text"] == "one two three STO STOP"


def test_stop_in_a_special_token_and_by_its_id_ends_the_text(server: Server, script: Script) -> None:
    end = script.tokenizer.encode("<|im_end|>", False)
    assert ask(server, script, "special", stop="<|im_end|>")["text"] == "beforewithin"
    assert ask(server, script, "special", stop_token_ids=end)["text"] == "beforewithin"
    shown = ask(server, script, "special", stop_token_ids=end, include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown["text"] == "before<|im_start|>within<|im_end|>"


def closed_form(emitted: int, top: int) -> tuple[float, list[float]]:
    """The logprob of the id that comes next, and the `top` greatest ones."""
    logits = -0.25 * (np.arange(VOCAB) % 16)
    logits[emitted] = LEAD
    logprobs = logits - np.log(np.exp(logits).sum())
    return logprobs[emitted], sorted(logprobs, reverse=True)[:top]


@pytest.mark.parametrize("name", TEXTS)
def test_logprobs_have_the_closed_form_and_the_tokens_make_the_text(server: Server, script: Script, name: str) -> None:
    ids = script.entries[name][1]
    # The bias makes no other id win, and penalties do not show: logprobs are those of the raw logits.
    changes: dict[str, Any] = {"logit_bias": {"5": 4.0, str(ids[0]): 1.0}, "frequency_penalty": 0.01}
    choice = ask(server, script, name, logprobs=2, skip_special_tokens=False, **changes)
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == len(ids)
    for place, id_ in enumerate(ids):
        own, likeliest = closed_form(id_, 2)
        assert found["token_logprobs"][place] == pytest.approx(own, abs=1e-4)
        assert sorted(found["top_logprobs"][place].values(), reverse=True) == pytest.approx(likeliest, abs=1e-4)
    if "bytes:" not in "".join(found["tokens"]):
        assert "".join(found["tokens"]) == choice["text"]
        for token, offset in zip(found["tokens"], found["text_offset"]):
            assert choice["text"][offset : offset + len(token)] == token


def first_other(server: Server, script: Script, rival: float, **body: Any) -> int:
    """How often the repeated id comes before one whose logit is made `rival` wins."""
    other = 16 * 20  # its own logit is 0
    choice = ask(server, script, "repeated", logprobs=0, logit_bias={str(other): rival}, **body)
    tokens = choice["logprobs"]["tokens"]
    repeated = script.text([REPEATED])
    return next((place for place, token in enumerate(tokens) if token != repeated), len(tokens))


def test_penalties_have_their_closed_forms(server: Server, script: Script) -> None:
    assert first_other(server, script, 7.9) == 20
    assert first_other(server, script, 8.1) == 0
    # 8 - 0.04 c < 7.9 for c >= 3; presence takes its whole at once
    assert first_other(server, script, 7.9, frequency_penalty=0.04) == 3
    assert first_other(server, script, 7.9, presence_penalty=0.09) == 20
    assert first_other(server, script, 7.9, presence_penalty=0.11) == 1
    # 8 / 1.02 < 7.9; the prompt does not have the id, so its first time is free
    assert first_other(server, script, 7.9, repetition_penalty=1.02) == 1
    assert first_other(server, script, 7.9, repetition_penalty=1.01) == 20


def test_end_of_sequence_waits_for_the_least_number_of_tokens(server: Server, script: Script) -> None:
    ended = ask(server, script, "ended", ignore_eos=False)
    assert (ended["text"], ended["finish_reason"]) == ("The end", "stop")
    assert ask(server, script, "ended", ignore_eos=False, min_tokens=2)["text"] == "The end"
    held = ask(server, script, "ended", ignore_eos=False, min_tokens=4, max_tokens=4, logprobs=0)
    assert held["finish_reason"] == "length"
    assert len(held["logprobs"]["tokens"]) == 4


def test_same_prompt_at_once_with_and_without_logprobs_and_bias(server: Server, script: Script) -> None:
    """Rows of all kinds in one step keep to their own."""
    prompt, answer = script.entries["stops"]
    body = {"model": "demo", "prompt": [prompt] * 4, "max_tokens": len(answer), "temperature": 0, "n": 2}
    with server.client() as client:
        choices = client.post("/v1/completions", json=body | {"logprobs": 3}).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(8))
    assert {choice["text"] for choice in choices} == {TEXTS["stops"]}
