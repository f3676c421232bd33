"""A server as the chat sees it: what it reads of answers, and what it says of servers that cannot be used."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tests.unit.chat.stub import CUT, DONE, FINISH, Stub, delta, error, event
from tpserve.chat.server import AnswerError, Piece, Server
from tpserve.settings import UserError

BODY: dict[str, Any] = {"model": "one", "messages": []}


def answer(stub: Stub) -> list[Piece]:
    return list(Server(stub.url, None).answer(BODY))


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_address_may_end_in_v1(stub: Stub, suffix: str) -> None:
    for url in (stub.url + suffix, stub.url.removeprefix("http://") + suffix):
        assert Server(url, None).models() == ["one", "two"]


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://host?x=1", "http://[::1"])
def test_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="--url"):
        Server(url, None)


def test_model_is_the_first_unless_named(stub: Stub) -> None:
    assert (Server(stub.url, None).choose(None), Server(stub.url, None).choose("two")) == ("one", "two")
    with pytest.raises(UserError, match=r"the model three is not served at http://\S+; served: one, two"):
        Server(stub.url, None).choose("three")


def test_server_that_is_not_there_is_told_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UserError, match=rf"no server answers at http://127.0.0.1:{port} \(.+\); start one with tpserve launch"):
        Server(f"127.0.0.1:{port}", None).models()


@pytest.mark.parametrize("answered", [(200, b"<html>"), (200, {"data": [{}]}), (200, []), (404, {"detail": "Not Found"})])
def test_server_of_another_kind_is_told(stub: Stub, answered: tuple[int, Any]) -> None:
    stub.models = answered
    with pytest.raises(UserError, match=f"no OpenAI-compatible server: GET /v1/models answers with status {answered[0]}"):
        Server(stub.url, None).models()


def test_key_is_sent_and_its_want_is_told(stub: Stub) -> None:
    stub.key = "secret"
    assert Server(stub.url, "secret other").models() == ["one", "two"]
    for key in (None, "", "wrong"):
        with pytest.raises(UserError, match="wants a key in --api-key or TPSERVE_API_KEY: this key is not known"):
            Server(stub.url, key).models()
    with pytest.raises(UserError, match="printable ASCII"):
        Server(stub.url, "schlüssel")


def test_pieces_are_text_reasoning_and_end(stub: Stub) -> None:
    stub.script = [delta(role="assistant", content=""), delta(reasoning_content="So"), delta(content="Hi"), CUT, DONE]
    assert answer(stub) == [Piece(), Piece(reasoning="So"), Piece("Hi"), Piece(finish_reason="length")]


def test_pieces_are_whole_however_the_bytes_come(stub: Stub) -> None:
    texts = ["naïve 👩‍👩‍👧", "你好\u2028\x85\x0b", "שלום"]
    data = b": waiting\n\n" + b"".join(delta(content=text) for text in texts) + FINISH + DONE
    stub.script = [data[place : place + 1] for place in range(len(data))]
    assert [piece.text for piece in answer(stub)] == [*texts, ""]


def test_refused_answer_says_why_in_one_line(stub: Stub) -> None:
    for refusal, says in (((400, error("too\nlong")), "too long"), ((502, b"bad gateway"), "status 502")):
        stub.refusal = refusal
        with pytest.raises(AnswerError, match=f"^{says}$"):
            answer(stub)


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ([event(error("the server failed"))], "the server failed"),
        ([event({"error": "plain"})], "plain"),
        ([FINISH], "broke off"),
        ([b'data: {"choi'], "broke off"),
        ([b"data: nonsense\n\n"], "no chunk of an answer: 'nonsense'"),
        ([b"data: 5\n\n"], "no chunk of an answer: '5'"),
        ([b'data: {"choices": ["abc"]}\n\n'], "no chunk of an answer"),
        ([b'data: {"choices": 5}\n\n'], "no chunk of an answer"),
        ([b'data: {"choices": [{"delta": "abc"}]}\n\n'], "no chunk of an answer"),
        ([b'data: {"choices": [{"delta": {"content": ["a"]}}]}\n\n'], "no chunk of an answer"),
    ],
)
def test_stream_that_breaks_gives_what_came_and_then_the_cause(stub: Stub, ending: list[bytes], says: str) -> None:
    stub.script = [delta(content="Hi"), *ending]
    pieces = Server(stub.url, None).answer(BODY)
    assert next(pieces) == Piece("Hi")
    with pytest.raises(AnswerError, match=says):
        list(pieces)
