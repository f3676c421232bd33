"""A conversation as the body of a request, and as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpserve.chat.conversation import Conversation, said


def test_body_has_all_turns_in_order() -> None:
    conversation = Conversation("m", "Be brief.", {"temperature": 0.0}, [("a", "b"), ("c", "d")])
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    texts = ["Be brief.", "a", "b", "c", "d", "e"]
    messages = [said(role, text) for role, text in zip(roles, texts)]
    assert conversation.body(said("user", "e")) == {"model": "m", "messages": messages, "temperature": 0.0}


def test_body_without_a_system_message_has_none() -> None:
    assert Conversation("m").body(said("user", "a")) == {"model": "m", "messages": [said("user", "a")]}


def test_file_is_the_body_and_is_never_overwritten(tmp_path: Path) -> None:
    conversation = Conversation("m", turns=[("ä", "👩‍👩‍👧")])
    name = str(tmp_path / "talk.json")
    conversation.save(name)
    assert json.loads(Path(name).read_text(encoding="utf-8")) == conversation.body()
    with pytest.raises(FileExistsError):
        conversation.save(name)
