from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from tests.unit.frontend.small import END
from tpserve.frontend.text.detokenize import AnswerText, Detokenizer
from tpserve.frontend.text.stops import StopPattern
from tpserve.messages import Finish
from tpserve.tokenizer import Tokenizer

IDS = st.lists(st.integers(3, 299), max_size=40)  # every id but the special ones, so mostly not UTF-8
TEXTS = [
    "😀 🎉 👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈\n", "你好世界。今天天气很好。", "e\u0301 a\u0308 नमस्ते สวัสดี", "שלום مرحبا Привет ď",
    " leading", "  two   three     five", "\ttab\r\n\r\n", "a real \ufffd and two \ufffd\ufffd", "the quick brown fox",
]  # fmt: skip


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.add, ids), detokenizer.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_joined_deltas_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert "".join(deltas(tokenizer, tokenizer.encode(text, False))) == text


@given(IDS)
def test_joined_deltas_of_any_ids_are_the_librarys_own_decode(
    tokenizer: Tokenizer, reference: HfTokenizer, ids: list[int]
) -> None:
    assert "".join(deltas(tokenizer, ids)) == reference.decode(ids, skip_special_tokens=False)


def test_a_character_comes_with_its_last_id(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀!", False)
    assert deltas(tokenizer, ids) == ["", "", "", "😀", "!", ""]


def test_an_unfinished_character_at_the_end_is_replaced(tokenizer: Tokenizer) -> None:
    assert deltas(tokenizer, tokenizer.encode("😀", False)[:2]) == ["", "", "\ufffd"]


def test_bytes_that_are_no_text_do_not_hold_up_what_follows(tokenizer: Tokenizer) -> None:
    lead = tokenizer.encode("😀", False)[0]
    assert deltas(tokenizer, [lead, lead, lead, *tokenizer.encode("a", False)]) == ["", "\ufffd", "\ufffd", "\ufffda", ""]


def test_a_real_replacement_character_is_not_held_back(tokenizer: Tokenizer) -> None:
    assert deltas(tokenizer, tokenizer.encode("\ufffd", False))[-2:] == ["\ufffd", ""]


def test_an_id_beyond_the_tokenizer_gives_no_text(tokenizer: Tokenizer) -> None:
    assert deltas(tokenizer, [305, *tokenizer.encode("a", False)]) == ["", "a", ""]


def answer(tokenizer: Tokenizer, *stops: str, skip: bool = True) -> AnswerText:
    patterns, hidden_ids = [StopPattern(stop) for stop in stops], tokenizer.special_ids if skip else frozenset()
    return AnswerText(tokenizer, patterns, hidden_ids, min_tokens=0, include_stop=False)


@pytest.mark.parametrize(("skip", "shown"), [(True, "ab"), (False, "a<|user|>b")])
def test_special_tokens_are_shown_only_if_wanted(tokenizer: Tokenizer, skip: bool, shown: str) -> None:
    text = answer(tokenizer, skip=skip)
    for id_ in tokenizer.encode("a<|user|>b", False):
        text.add(id_, Finish.NONE)
    assert text.take() == shown


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_that_is_a_special_token_matches(tokenizer: Tokenizer, skip: bool) -> None:
    text = answer(tokenizer, "<|user|>", skip=skip)
    for id_ in tokenizer.encode("ab<|user|>c", False):
        text.add(id_, Finish.NONE)
    assert (text.take(), text.is_stopped) == ("ab", True)


@pytest.mark.parametrize("skip", [True, False])
def test_the_end_of_sequence_id_is_not_shown(tokenizer: Tokenizer, skip: bool) -> None:
    text = answer(tokenizer, "b never", skip=skip)
    text.add(tokenizer.encode("a b", False)[0], Finish.NONE)
    *_, last = tokenizer.encode("a b", False)
    text.add(last, Finish.NONE)
    text.add(END, Finish.STOP)
    assert (text.take(), text.is_stopped) == ("a b", False)


def test_what_was_held_back_comes_with_the_last_id(tokenizer: Tokenizer) -> None:
    text = answer(tokenizer, "ab")
    (a,) = tokenizer.encode("a", False)
    text.add(a, Finish.NONE)
    assert text.take() == ""
    text.add(a, Finish.LENGTH)
    assert text.take() == "aa"


def test_an_unfinished_character_is_flushed_at_the_end_but_not_after_a_stop(tokenizer: Tokenizer) -> None:
    lead = tokenizer.encode("😀", False)[0]
    open_end, stopped = answer(tokenizer), answer(tokenizer, "a")
    open_end.add(lead, Finish.LENGTH)
    stopped.add(tokenizer.encode("a", False)[0], Finish.NONE)
    stopped.add(lead, Finish.LENGTH)
    assert (open_end.take(), stopped.take()) == ("\ufffd", "")
