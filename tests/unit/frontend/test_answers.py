"""Answers as they are shown, whole and in any pieces: text, tokens, logprobs, ends."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json
from tokenizers import Tokenizer as HfTokenizer

from tests.unit.frontend.rig import scores
from tests.unit.frontend.small import END
from tests.unit.frontend.text.test_stops import ended
from tpserve.deployment import Deployment
from tpserve.frontend import schema
from tpserve.frontend.answers import Answer, ChatAnswer, CompletionAnswer
from tpserve.frontend.chat.answer.message import PlainMessage
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.records import Choice, Generation, Record, new_record
from tpserve.frontend.text.echo import echoes
from tpserve.frontend.text.logprobs import split
from tpserve.messages import Finish, PromptScores
from tpserve.tokenizer import Tokenizer

VOCAB = 310
TEXTS = ["a 😀 🎉 end", "你好世界。", " leading", "two  spaces", "the fox the fox", "a \ufffd"]


@dataclass
class Small:
    """The small model."""

    tokenizer: Tokenizer
    deployment: Deployment

    def completion(self, **fields: Any) -> tuple[Record, CompletionAnswer]:
        """An open completion."""
        request = schema.completion_request({"prompt": "the fox", **fields}, 1, VOCAB)
        prompts = [
            np.array(self.tokenizer.encode(one, request.add_special_tokens) if isinstance(one, str) else one, "<i4")
            for one in request.prompts or ()
        ]
        return self._open(request, prompts, CompletionAnswer)

    def chat(self, **fields: Any) -> tuple[Record, ChatAnswer]:
        """An open chat."""
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return self._open(
            schema.chat_request(body, 1, VOCAB), [np.array([5, 6], "<i4")], partial(ChatAnswer, new_parser=PlainMessage)
        )

    def _open(self, request: schema.GenerateRequest, prompts: list[np.ndarray], kind: Callable[..., Any]) -> Any:
        generation = Generation(request, prompts, 0.0, echoes=echoes(request, prompts, self.tokenizer))
        for place in range(len(prompts)):
            generation.records.append(new_record(generation, place, place, self.tokenizer, self.deployment))
        return generation.records[0], kind("small", generation, self.tokenizer)


@pytest.fixture(scope="module")
def small(tokenizer: Tokenizer, deployment: Deployment) -> Small:
    return Small(tokenizer, deployment)


def add(record: Record, id_: int, finish: Finish = Finish.NONE, choice: int = 0) -> Choice:
    """The engine's next id of a choice, with the logprobs that were asked for."""
    submit = record.submit()
    score = next(split(scores([id_], submit.logprobs)), None)
    record.choices[choice].add(id_, finish, 1.0, score)
    return record.choices[choice]


def run(record: Record, ids: list[int], finish: Finish = Finish.LENGTH) -> Choice:
    """Ids up to the end, be it a stop string's."""
    for place, id_ in enumerate(ids, 1):
        choice = add(record, id_, finish if place == len(ids) else Finish.NONE)
        if choice.finish_reason is not None:
            break
    return choice


def streamed(record: Record, answer: Answer, ids: list[int], finish: Finish, pauses: set[int]) -> list[dict[str, Any]]:
    """The choices of all chunks, where the client takes what is new after the ids at `pauses`, and at the end."""
    body = b""
    for place, id_ in enumerate(ids, 1):
        choice = add(record, id_, finish if place == len(ids) else Finish.NONE)
        if choice.finish_reason is not None:
            break
        if place in pauses:
            body += answer.events([(choice, choice.take())])
    body += answer.events([(choice, choice.take())])
    return [json.loads(line[6:])["choices"][0] for line in body.decode().split("\n\n") if line]


def written(answer: Answer) -> dict[str, Any]:
    """The whole answer, as a client reads it."""
    return json.loads(to_json(answer.whole()))  # type: ignore[no-any-return]


def whole(record: Record, answer: Answer, ids: list[int], finish: Finish) -> dict[str, Any]:
    """The one choice of a whole answer."""
    run(record, ids, finish)
    return written(answer)["choices"][0]  # type: ignore[no-any-return]


# Any ids, any stops, in any pieces

IDS = st.lists(st.integers(3, 299), min_size=1, max_size=24)  # every id but the special ones, so mostly not UTF-8
ANY_IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)
PAUSES = st.sets(st.integers(1, 24))


@st.composite
def with_stops(draw: st.DrawFn, tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Stop strings that mostly occur in the text of the ids."""
    text = b"".join(map(tokenizer.piece, ids)).decode("utf-8", "replace") or "x"
    starts = st.integers(0, len(text) - 1)
    parts = st.tuples(starts, st.integers(1, 4)).map(lambda cut: text[cut[0] : cut[0] + cut[1]])
    return draw(st.lists(parts | st.text("ab the", min_size=1, max_size=3), max_size=3))


ENDS = st.sampled_from([Finish.LENGTH, Finish.STOP, Finish.COMPLETE])


@given(st.data(), ANY_IDS, PAUSES, st.booleans(), st.booleans(), st.integers(0, 5), ENDS)
def test_pieces_of_an_answer_joined_are_the_whole(
    small: Small, data: st.DataObject, ids: list[int], pauses: set[int], include: bool, skip: bool, least: int, finish: Finish
) -> None:
    fields = {
        "stop": data.draw(with_stops(small.tokenizer, ids)), "include_stop_str_in_output": include, "min_tokens": least,
        "skip_special_tokens": skip,
    }  # fmt: skip
    for make, more in ((small.completion, {"logprobs": 1}), (small.chat, {"logprobs": True, "top_logprobs": 1})):
        one = whole(*make(**fields, **more), ids, finish)
        chunks = streamed(*make(stream=True, **fields, **more), ids, finish, pauses)
        assert _joined(chunks) == (one["text"] if "text" in one else one["message"]["content"])
        assert _tokens(chunks) == _tokens([one])
        assert [c["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [one["finish_reason"]]
        assert [c["stop_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [one["stop_reason"]]


@given(st.data(), IDS, st.booleans())
def test_answer_is_the_librarys_text_up_to_the_first_stop(
    small: Small, reference: HfTokenizer, data: st.DataObject, ids: list[int], include: bool
) -> None:
    stops = data.draw(with_stops(small.tokenizer, ids))
    one = whole(*small.completion(stop=stops, include_stop_str_in_output=include, logprobs=0), ids, Finish.LENGTH)
    text, stop = ended(reference.decode(ids, skip_special_tokens=False), stops)
    assert one["text"] == (text + (stop or "") if include else text)
    assert (one["finish_reason"], one["stop_reason"]) == (("stop", stop) if stop else ("length", None))
    listed = one["logprobs"]
    assert "".join(listed["tokens"]).startswith(one["text"])
    assert all(offset < len(one["text"]) for offset in listed["text_offset"] if stop)
    if not stop:
        assert "".join(listed["tokens"]) == one["text"]
        assert len(listed["tokens"]) == len(ids)


@given(ANY_IDS, st.booleans())
def test_each_token_is_the_text_from_its_offset_to_the_next(small: Small, ids: list[int], skip: bool) -> None:
    fields: dict[str, Any] = {"logprobs": 2, "echo": True, "skip_special_tokens": skip, "prompt": [*ids, 5]}
    record, answer = small.completion(**fields)
    record.prompt_scores.append(scores([*ids, 5][1:], 2))
    one = whole(record, answer, ids, Finish.STOP)
    offsets = [*one["logprobs"]["text_offset"], len(one["text"])]
    assert [one["text"][start:end] for start, end in itertools.pairwise(offsets)] == one["logprobs"]["tokens"]


def _joined(chunks: list[dict[str, Any]]) -> str:
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in chunks)


def _tokens(chunks: list[dict[str, Any]]) -> list[Any]:
    """All that is said of each token, in order."""
    found: list[Any] = []
    for listed in filter(None, (chunk["logprobs"] for chunk in chunks)):
        found += listed["content"] if "content" in listed else zip(*(listed[name] for name in sorted(listed)))
    return found


# Logprobs


def test_completion_logprobs_are_parallel_lists(small: Small) -> None:
    record, answer = small.completion(logprobs=2)
    ids = [*small.tokenizer.encode("the fox", False), END]
    one = whole(record, answer, ids, Finish.STOP)
    listed = one["logprobs"]
    assert listed["tokens"] == [*map(small.tokenizer.text_of, ids[:-1]), ""]
    assert "".join(listed["tokens"]) == one["text"] == "the fox"
    assert listed["token_logprobs"] == pytest.approx([-id_ / 1000 for id_ in ids])
    assert listed["text_offset"] == [0, *np.cumsum([len(token) for token in listed["tokens"]])[:-1]]
    own = small.tokenizer.text_of(ids[0])
    assert listed["top_logprobs"][0] == pytest.approx({"<|end|>": 0.0, "<|user|>": -0.001, own: -ids[0] / 1000})
    assert listed["top_logprobs"][-1] == pytest.approx({"<|end|>": 0.0, "<|user|>": -0.001})  # the own one among them


def test_logprobs_zero_has_the_sampled_id_alone(small: Small) -> None:
    (a,) = small.tokenizer.encode("a", False)
    listed = whole(*small.completion(logprobs=0), [a], Finish.LENGTH)["logprobs"]
    assert listed["top_logprobs"] == [{"a": pytest.approx(-a / 1000)}]


def test_ids_that_are_no_text_have_keys_of_their_own(small: Small) -> None:
    first, second, *_ = small.tokenizer.encode("😀", False)
    tops = whole(*small.completion(logprobs=0), [first, second, 305, 306], Finish.LENGTH)["logprobs"]["top_logprobs"]
    assert [*map(list, tops)] == [["bytes:\\xf0"], ["bytes:\\x9f"], ["token_id:305"], ["token_id:306"]]


def test_chat_logprobs_have_the_bytes_of_the_text(small: Small) -> None:
    ids = [*small.tokenizer.encode("a😀", False), END]
    one = whole(*small.chat(logprobs=True, top_logprobs=2), ids, Finish.STOP)
    content = one["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == one["message"]["content"] == "a😀"
    assert [entry["token"] for entry in content] == ["a", "", "", "", "😀", ""]
    assert content[0]["top_logprobs"] == [
        {"token": "<|end|>", "logprob": 0.0, "bytes": list(b"<|end|>")},
        {"token": "<|user|>", "logprob": pytest.approx(-0.001), "bytes": list(b"<|user|>")},
    ]


def test_chat_logprobs_without_a_number_name_no_others(small: Small) -> None:
    content = whole(*small.chat(logprobs=True), small.tokenizer.encode("a", False), Finish.LENGTH)["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]]


def test_no_logprobs_unless_asked(small: Small) -> None:
    for make in (small.completion, small.chat):
        assert whole(*make(), [5, 6], Finish.LENGTH)["logprobs"] is None


def test_tokens_that_a_stop_string_takes_out_are_counted_and_not_listed(small: Small) -> None:
    record, answer = small.completion(logprobs=0, stop=" fox")
    ids = small.tokenizer.encode("the dog the fox", False)
    one = whole(record, answer, ids, Finish.LENGTH)
    assert "".join(one["logprobs"]["tokens"]) == one["text"] == "the dog the"
    assert written(answer)["usage"]["completion_tokens"] == len(ids)


def test_score_that_is_kept_does_not_keep_all_of_its_step() -> None:
    step = scores([5, 6], 3)
    assert not any(np.shares_memory(score.ids, step.ids) for score in split(step) if score is not None)


def test_token_comes_with_its_first_character(small: Small) -> None:
    record, _ = small.completion(logprobs=0, stop="oxen")
    *before, last = small.tokenizer.encode("the fox", False)
    for id_ in before:
        add(record, id_)
    choice = add(record, last)
    came = choice.tokens
    news = choice.take()
    assert (news.text, news.tokens) == ("the f", [token for token in came if token.offset < 5])
    assert [*news.tokens, *choice.tokens] == came  # what was taken is not kept
    add(record, last, Finish.LENGTH)
    assert len(choice.take().tokens) == len(came) + 1 - len(news.tokens)
    assert not choice.tokens


# The prompt: echo and prompt_logprobs


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stream", [False, True])
def test_echo_is_the_prompt_and_then_the_answer(small: Small, text: str, stream: bool) -> None:
    record, answer = small.completion(prompt=text, echo=True, stream=stream)
    ids = small.tokenizer.encode(" dog", False)
    if stream:
        assert _joined(streamed(record, answer, ids, Finish.LENGTH, {1})) == text + " dog"
    else:
        assert whole(record, answer, ids, Finish.LENGTH)["text"] == text + " dog"


@pytest.mark.parametrize("text", [*TEXTS, "<|user|>a<|end|>"])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_with_logprobs_has_the_prompts_tokens_first(small: Small, text: str, as_ids: bool, max_tokens: int) -> None:
    prompt = small.tokenizer.encode(text, True)
    record, answer = small.completion(prompt=prompt if as_ids else text, echo=True, logprobs=1, max_tokens=max_tokens)
    assert record.submit().prompt_logprobs == 1
    record.prompt_scores.append(scores(prompt[1:], 1))
    answered = small.tokenizer.encode("ab", False)
    one = whole(record, answer, answered, Finish.LENGTH)
    listed, ids = one["logprobs"], [*prompt, *answered[:max_tokens]]
    assert "".join(listed["tokens"]) == one["text"] == text + "ab"[:max_tokens]
    assert {len(values) for values in listed.values()} == {len(ids)}
    assert listed["token_logprobs"] == [None, *(pytest.approx(-id_ / 1000) for id_ in ids[1:])]
    assert listed["top_logprobs"][0] is None
    assert all("<|end|>" in top for top in listed["top_logprobs"][1:])


def test_echo_of_several_prompts_and_choices_is_each_ones_own(small: Small) -> None:
    record, answer = small.completion(prompt=["a", "b"], n=2, echo=True, max_tokens=0)
    for one in record.generation.records:
        for choice in range(2):
            add(one, 5, Finish.LENGTH, choice)
    assert [choice["text"] for choice in written(answer)["choices"]] == ["a", "a", "b", "b"]


def test_echoes_of_one_answer_are_bounded_together(small: Small) -> None:
    small.completion(prompt="x" * 2**17, n=128, echo=True)
    with pytest.raises(InvalidRequest, match="echo: the answer would begin with"):
        small.completion(prompt=["x" * 2**17, "y"], n=128, echo=True)


@pytest.mark.parametrize(
    ("fields", "param"), [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "logprobs")]
)
def test_logprobs_of_an_answers_prompts_are_bounded_together(small: Small, fields: dict[str, Any], param: str) -> None:
    prompts = [[5] * 1000] * 12
    small.completion(prompt=prompts, **fields)
    for more in ({"prompt": prompts * 2}, {"prompt": prompts, "n": 2}):
        with pytest.raises(InvalidRequest, match="logprobs of prompts") as caught:
            small.completion(**fields, **more)
        assert caught.value.param == param


def test_answer_of_no_tokens_has_none(small: Small) -> None:
    record, answer = small.completion(max_tokens=0, logprobs=1)
    submit = record.submit()
    assert (submit.max_tokens, submit.logprobs) == (1, -1)
    one = whole(record, answer, [END], Finish.STOP)
    assert (one["text"], one["finish_reason"], one["stop_reason"], one["logprobs"]["tokens"]) == ("", "length", None, [])
    assert written(answer)["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_are_maps_of_ids_the_first_null(small: Small) -> None:
    record, answer = small.completion(prompt=[7, 1, 9], prompt_logprobs=2)
    record.prompt_scores += [scores([1], 2), scores([9], 2)]
    shown = whole(record, answer, [5], Finish.LENGTH)["prompt_logprobs"]
    end = {"logprob": 0.0, "rank": 1, "decoded_token": "<|end|>"}
    user = {"logprob": pytest.approx(-0.001), "rank": 2, "decoded_token": "<|user|>"}
    nine = {"logprob": pytest.approx(-0.009), "decoded_token": small.tokenizer.text_of(9)}  # of no known rank
    assert shown == [None, {"1": user, "0": end}, {"9": nine, "0": end, "1": user}]


def test_prompt_logprobs_of_a_chat_are_the_answers(small: Small) -> None:
    record, answer = small.chat(prompt_logprobs=0)
    record.prompt_scores.append(scores([6], 0))
    run(record, [5])
    six = {"logprob": pytest.approx(-0.006), "decoded_token": small.tokenizer.text_of(6)}
    assert written(answer)["prompt_logprobs"] == [None, {"6": six}]


def test_prompts_logprobs_that_have_come_are_not_asked_for_again(small: Small) -> None:
    record, _ = small.completion(prompt=[7, 1, 9], prompt_logprobs=0)
    record.prompt_scores.append(scores([1], 0))
    assert (record.submit().prompt_logprobs, record.prompt_scores) == (0, [])  # they are not whole: all come again
    record.prompt_scores += [scores([1], 0), scores([9], 0)]
    assert (record.submit().prompt_logprobs, len(record.prompt_scores)) == (-1, 2)


def test_message_of_scores_gives_a_position_for_each_count() -> None:
    message = PromptScores(1, scores([7, 8], 1))
    assert [(score.id, [*score.likeliest(1)]) for score in split(message.scores) if score] == [(7, [(0, 0.0)]), (8, [(0, 0.0)])]


# Ends


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_stop_id_ends_the_answer_and_is_shown_only_if_wanted(small: Small, include: bool, text: str) -> None:
    a, b = small.tokenizer.encode("a", False) + small.tokenizer.encode("b", False)
    record, answer = small.completion(stop_token_ids=[b, b], include_stop_str_in_output=include)
    assert record.submit().stop_ids.tolist() == [END, b]
    one = whole(record, answer, [a, b], Finish.STOP)
    assert (one["text"], one["finish_reason"], one["stop_reason"]) == (text, "stop", b)


@pytest.mark.parametrize(("skip", "text"), [(True, "a"), (False, "a<|end|>")])
def test_end_of_sequence_is_shown_only_with_special_tokens_and_stops(small: Small, skip: bool, text: str) -> None:
    (a,) = small.tokenizer.encode("a", False)
    record, answer = small.completion(skip_special_tokens=skip, include_stop_str_in_output=True)
    one = whole(record, answer, [a, END], Finish.STOP)
    assert (one["text"], one["finish_reason"], one["stop_reason"]) == (text, "stop", None)


def test_stop_ids_hold_where_the_end_of_sequence_is_ignored(small: Small) -> None:
    record, _ = small.completion(ignore_eos=True, stop_token_ids=[7])
    assert record.submit().stop_ids.tolist() == [7]


def test_id_that_completes_a_grammar_is_part_of_the_answer(small: Small) -> None:
    one = whole(*small.completion(), small.tokenizer.encode("ab", False), Finish.COMPLETE)
    assert (one["text"], one["finish_reason"], one["stop_reason"]) == ("ab", "stop", None)


def test_stop_string_counts_once_min_tokens_have_come(small: Small) -> None:
    (a,) = small.tokenizer.encode("a", False)
    texts = [whole(*small.completion(stop="a", min_tokens=least), [a] * 4, Finish.LENGTH)["text"] for least in range(5)]
    assert texts == ["", "a", "aa", "aaa", "aaaa"]


def test_stop_string_may_begin_within_the_first_min_tokens(small: Small) -> None:
    (a,) = small.tokenizer.encode("a", False)
    one = whole(*small.completion(stop="aaa", min_tokens=3), [a] * 5, Finish.LENGTH)
    assert (one["text"], one["finish_reason"]) == ("a", "stop")


def test_usage_comes_in_every_chunk_if_wanted(small: Small) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    record, answer = small.completion(stream=True, stream_options=options)
    counts = []
    for _ in range(2):
        choice = add(record, 5)
        counts.append(json.loads(answer.events([(choice, choice.take())])[6:])["usage"]["completion_tokens"])
    assert counts == [1, 2]
