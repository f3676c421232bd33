from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLTokenizer

from tests.unit.constrained import sample
from tests.unit.frontend.small import END
from tpserve import grammar
from tpserve.frontend.chat.answer.message import MessageParser, PlainMessage, merged
from tpserve.frontend.chat.message_format import MessageFormat
from tpserve.frontend.chat.template import ChatTemplate
from tpserve.frontend.chat.tools import ChatTools
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.schema import GenerateRequest, chat_request
from tpserve.tokenizer import Tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NOW = {"type": "function", "function": {"name": "now"}}
AUTO = ChatTools(tuple(TOOLS), "auto")

PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
ROME = '{"arguments": {"city": "Ro{m}e \\"2\\"" , "x":[{}]}, "name": "weather"}'
NAMES = ("auto", "none", "hermes", "llama3_json")


def call(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


@dataclass
class Read:
    """What a parser makes of an answer."""

    message: dict[str, Any]
    finish_reason: str | None

    @property
    def content(self) -> str | None:
        content: str | None = self.message["content"]
        return content

    @property
    def reasoning(self) -> str | None:
        return self.message.get("reasoning_content")

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [(one["function"]["name"], one["function"]["arguments"]) for one in self.message.get("tool_calls", ())]


def asked(tools: list[dict[str, Any]] | None = None, **fields: Any) -> GenerateRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS if tools is None else tools, **fields}
    return chat_request(body, None, 310)


def rendered(is_open: bool) -> Callable[[GenerateRequest], str]:
    """Renders a prompt that has opened reasoning, or one that has not."""
    return lambda _: "<think>\n" if is_open else "hi"


def constrained(form: MessageFormat, request: GenerateRequest, is_open: bool = False) -> GenerateRequest:
    return form.prepare(request, rendered(is_open))[0]


def reader(form: MessageFormat, tools: ChatTools | None, is_open: bool = False) -> MessageParser:
    """What reads one answer to a chat with these tools."""
    return form.prepare(replace(asked([]), tools=tools), rendered(is_open))[2]()


class Formats:
    """Formats of a model, by their settings."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def __call__(self, calls: str = "hermes", reasons: str = "none", template: str = "") -> MessageFormat:
        return MessageFormat(ChatTemplate(template, {}), self._tokenizer, calls, reasons)

    def read(
        self, pieces: str | Sequence[str], calls: str = "hermes", reasons: str = "none", tools: ChatTools | None = AUTO,
        is_open: bool = False, reason: str = "stop",
    ) -> Read:  # fmt: skip
        parser = reader(self(calls, reasons), tools, is_open)
        deltas = [delta for piece in ([pieces] if isinstance(pieces, str) else pieces) for delta in parser.feed(piece)]
        message = merged([*deltas, *parser.end()])
        return Read(message, parser.finish_reason(reason))


@pytest.fixture(scope="session")
def formats(tokenizer: Tokenizer) -> Formats:
    return Formats(tokenizer)


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> LLTokenizer:
    return grammar.ll_tokenizer(tokenizer, 310, [END])


# Calls


def test_hermes_calls_are_read_with_content_around_them(formats: Formats) -> None:
    read = formats.read(f"Let me see.\n\n{call(PARIS)}\n{call(ROME)}\n\nDone.")
    assert read.content == "Let me see.\n\nDone."
    assert read.calls == [("weather", '{"city": "Paris"}'), ("weather", '{"city": "Ro{m}e \\"2\\"" , "x":[{}]}')]
    assert read.finish_reason == "tool_calls"


@pytest.mark.parametrize("cut", ["\n<tool", '\n<tool_call>\n{"na', '\n<tool_call>\n{"name": "now", '])
def test_beginning_of_a_call_that_is_cut_is_no_content_where_all_is_calls(formats: Formats, cut: str) -> None:
    required = ChatTools(tuple(TOOLS), "required")
    read = formats.read(f"{call(PARIS)}{cut}", tools=required, reason="length")
    assert (read.content, len(read.calls), read.finish_reason) == (None, 1, "length")
    assert formats.read(f"{call(PARIS)}{cut}").content == cut


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "now", "parameters": {}}',
        ' <|python_tag|>{"name": "now", "parameters": {}}',
        '{"type": "function", "id": [1, {"a": "}"}], "n": -1.5e3, "name": "now", "parameters": {}}',
        '[{"name": "now", "arguments": {}}]\n',
        '{"parameters" : {} ,"name":"now"} ;\n',
    ],
)
def test_bare_calls_are_read(formats: Formats, text: str) -> None:
    read = formats.read(text, "llama3_json")
    assert (read.content, read.calls, read.finish_reason) == (None, [("now", "{}")], "tool_calls")


@pytest.mark.parametrize("between", ["; ", ";", ", ", "\n", ""])
def test_several_bare_calls_are_read(formats: Formats, between: str) -> None:
    text = between.join(['{"name": "now", "parameters": {}}', '{"name": "weather", "parameters": {"a": 1}}'])
    assert formats.read(text, "llama3_json").calls == [("now", "{}"), ("weather", '{"a": 1}')]


def test_call_without_its_end_mark_is_one(formats: Formats) -> None:
    one = call(PARIS).removesuffix("\n</tool_call>")
    assert len(formats.read(f"{one}\n{call(PARIS)}").calls) == 2
    assert formats.read(one).message["content"] is None


@pytest.mark.parametrize(
    "text",
    [
        "Hello.\n",
        "a < b <tool_cal",
        "</tool_call>",
        call("nothing"),
        call("{}"),
        call('{"name": "weather"}'),
        call('{"name": "weather", "arguments": "x"}'),
        call('{"name": "weather", "arguments": [1]}'),
        call('{"name": "unknown", "arguments": {}}'),
        call('{"name": "weather", "name": "now", "arguments": {}}'),
        call('{"name": "weather", "x": nope, "arguments": {}}'),
        call('{"name": "weather" "arguments": {}}'),
        '<tool_call>\n{"name": "weath',
        '<tool_call>\n{"arguments": {"city": "Paris"}, ',
    ],
)
def test_text_that_makes_no_call_is_content(formats: Formats, text: str) -> None:
    read = formats.read(text)
    assert (read.content, read.calls, read.finish_reason) == (text, [], "stop")


@pytest.mark.parametrize(
    "text", ['{"a": 1}', "[1, 2]", "Hi {", " \n", '{"name": "unknown", "parameters": {}}', "<|python_ta", "["]
)
def test_text_that_is_no_bare_call_is_content(formats: Formats, text: str) -> None:
    read = formats.read(text, "llama3_json")
    assert (read.content, read.calls, read.finish_reason) == (text, [], "stop")


def test_content_goes_on_after_what_is_no_call(formats: Formats) -> None:
    read = formats.read(f"<tool_call>x <tool<tool_call>{PARIS}</tool_call>{call('{')} y")
    assert read.content == f"<tool_call>x <tool{call('{')} y"
    assert read.calls == [("weather", '{"city": "Paris"}')]
    again = formats.read('{"name": "now", "parameters": {}}; {"a": 1} y', "llama3_json")
    assert (again.content, again.calls) == ('; {"a": 1} y', [("now", "{}")])


def test_call_that_the_limit_cuts_keeps_what_there_is(formats: Formats) -> None:
    read = formats.read('<tool_call>\n{"name": "weather", "arguments": {"city": "Pa', reason="length")
    assert (read.content, read.calls, read.finish_reason) == (None, [("weather", '{"city": "Pa')], "length")


def test_arguments_end_where_they_cannot_go_on(formats: Formats) -> None:
    read = formats.read('<tool_call>\n{"name": "now", "arguments": {"a": 1</tool_call> so')
    assert (read.content, read.calls) == (" so", [("now", '{"a": 1')])


def test_only_the_first_call_is_told_where_several_are_forbidden(formats: Formats) -> None:
    read = formats.read(f"{call(PARIS)}\n{call(PARIS)} so", tools=ChatTools(tuple(TOOLS), "auto", parallel=False))
    assert (len(read.calls), read.content) == (1, " so")


@pytest.mark.parametrize("tools", [None, ChatTools(tuple(TOOLS), "none")])
def test_nothing_is_read_where_nothing_may_be_called(formats: Formats, tools: ChatTools | None) -> None:
    assert isinstance(reader(formats(), tools), PlainMessage)


def test_named_call_ends_as_any_answer(formats: Formats) -> None:
    read = formats.read(call('{"name": "now", "arguments": {}}'), tools=ChatTools(tuple(TOOLS), "required", "now"))
    assert (len(read.calls), read.finish_reason) == (1, "stop")


def test_tool_may_have_the_name_of_a_choice(formats: Formats) -> None:
    tools = ChatTools(({"type": "function", "function": {"name": "none"}},), "required", "none")
    assert formats.read(call('{"name": "none", "arguments": {}}'), tools=tools).calls == [("none", "{}")]


def test_call_streams_name_first_and_then_arguments_as_they_come(formats: Formats) -> None:
    parser = reader(formats(), AUTO)
    assert parser.feed('Hi\n<tool_call>\n{"name": "weather"') == [{"content": "Hi"}]
    first, second = parser.feed(', "arguments": {"ci')
    (begun,) = first["tool_calls"]
    assert (begun["index"], begun["type"], begun["function"]) == (0, "function", {"name": "weather", "arguments": ""})
    assert begun["id"].startswith("call_")
    assert len(begun["id"]) == 29
    assert second == {"tool_calls": [{"index": 0, "function": {"arguments": '{"ci'}}]}
    assert parser.feed('ty": 1') == [{"tool_calls": [{"index": 0, "function": {"arguments": 'ty": 1'}}]}]


def test_no_more_is_held_back_than_may_become_a_mark(formats: Formats) -> None:
    parser = reader(formats(), AUTO)
    assert parser.feed("a <tool_cal") == [{"content": "a "}]
    assert parser.feed("m") == [{"content": "<tool_calm"}]
    assert reader(formats("llama3_json"), AUTO).feed(" Hello {") == [{"content": " Hello {"}]


# Reasoning


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        (" \n<think>hm</think>yes", False, "hm", "yes"),
        ("<think></think>\n\nyes", False, None, "yes"),
        ("hm\n</think>\n\nyes\n", True, "hm", "yes\n"),
        ("<think>hm</think>yes", True, "hm", "yes"),
        ("hm\n\nhm </thin", True, "hm\n\nhm </thin", ""),
        ("\nyes <think>no</think>", False, None, "\nyes <think>no</think>"),
        (" <thin", False, None, " <thin"),
        ("", True, None, ""),
        ("\n", True, None, ""),
    ],
)
def test_reasoning_is_apart_from_content(
    formats: Formats, text: str, is_open: bool, reasoning: str | None, content: str
) -> None:
    read = formats.read(text, reasons="qwen3", tools=None, is_open=is_open)
    assert (read.reasoning, read.content) == (reasoning, content)


def test_calls_come_after_reasoning_only(formats: Formats) -> None:
    read = formats.read(f"<think>\n{call(PARIS)}\n</think>\n\n{call(PARIS)}", reasons="qwen3")
    assert (read.reasoning, read.content, len(read.calls)) == (call(PARIS), None, 1)


# However it is cut

_PARTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "\n", " ", PARIS, ROME, '{"name": "now", "parameters": {}}',
    "; ", "[", "]", "{", "}", '"', "\\", '{"name": "now", "arguments": {"a": ', "<|python_tag|>", "<", "text", "é", ",", "1",
]  # fmt: skip
_ANSWERS = st.lists(st.sampled_from(_PARTS) | st.text(max_size=3), max_size=12).map("".join)


@example(text="<think>x", cuts=[2], calls="hermes", reasons="qwen3", is_open=True, parallel=False)
@given(
    text=_ANSWERS, cuts=st.lists(st.integers(0, 200)), calls=st.sampled_from(["hermes", "llama3_json"]),
    reasons=st.sampled_from(["none", "qwen3"]), is_open=st.booleans(), parallel=st.booleans(),
)  # fmt: skip
def test_message_does_not_depend_on_how_the_text_is_cut(
    formats: Formats, text: str, cuts: list[int], calls: str, reasons: str, is_open: bool, parallel: bool
) -> None:
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    tools = ChatTools(tuple(TOOLS), "auto", parallel=parallel)
    whole, cut = (formats.read(given, calls, reasons, tools, is_open) for given in (text, pieces))
    assert (whole.content, whole.reasoning, whole.calls) == (cut.content, cut.reasoning, cut.calls)
    assert whole.finish_reason == cut.finish_reason


@given(text=_ANSWERS, calls=st.sampled_from(["hermes", "llama3_json"]))
def test_answer_without_calls_is_content_to_the_last_character(formats: Formats, text: str, calls: str) -> None:
    read = formats.read(text, calls)
    assert read.calls or read.content == text


# Grammars


@pytest.mark.parametrize("calls", NAMES)
@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tool_choice": "required", "parallel_tool_calls": False}])
def test_required_calls_follow_the_schemas(
    formats: Formats, tokens: LLTokenizer, tokenizer: Tokenizer, calls: str, fields: dict[str, Any]
) -> None:
    form = formats(calls)
    request, _, new_parser = form.prepare(asked(**fields), rendered(False))
    assert request.constraint == "tools"
    for seed in range(8):
        answer = sample(tokens, tokenizer, request.grammar, seed, likes=lambda piece: piece in b'}"')
        parser = new_parser()
        message = merged([*parser.feed(answer.text), *parser.end()])
        assert message["content"] is None
        functions = [made["function"] for made in message["tool_calls"]]
        assert len(functions) == 1 or "parallel_tool_calls" not in fields
        for function in functions if answer.is_complete else functions[:-1]:
            arguments = json.loads(function["arguments"])
            assert function["name"] == "now" or arguments in ({"city": "Paris"}, {"city": "Rome"})


def accepts(tokens: LLTokenizer, tokenizer: Tokenizer, text: str, answer: str) -> bool:
    """Whether the answer is a whole one under the grammar."""
    matcher = grammar.compile(tokens, text)
    ids = tokenizer.encode(answer, False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


STRICT = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]  # type: ignore[dict-item]
OSLO = PARIS.replace("Paris", "Oslo")
AGE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"age": {"const": 5}}}}}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"tool_choice": NOW}, [call('{"name": "now", "arguments": {"a": 1}}')], [call(PARIS), "now", ""]),
        ({"tool_choice": "required"}, [call(PARIS), f"{call(PARIS)}\n{call(PARIS)}"], [call(OSLO), f"x{call(PARIS)}", ""]),
        (
            {"tools": STRICT},
            ["hi", "", call(PARIS), f"hi\n{call(PARIS)}\n{call(PARIS)} bye"],
            [call(OSLO), "<tool_call>hi", f"hi {call(OSLO)}"],
        ),
        ({"response_format": AGE}, [call(PARIS), '{"age": 5}'], ["hi", '{"age": 6}']),
    ],
)
def test_grammar_of_an_answer_with_calls(
    formats: Formats, tokens: LLTokenizer, tokenizer: Tokenizer, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    text = constrained(formats(), asked(**fields)).grammar
    assert [answer for answer in good if not accepts(tokens, tokenizer, text, answer)] == []
    assert [answer for answer in bad if accepts(tokens, tokenizer, text, answer)] == []


def test_grammar_of_bare_calls_leaves_room_for_content(formats: Formats, tokens: LLTokenizer, tokenizer: Tokenizer) -> None:
    text = constrained(formats("llama3_json"), asked(STRICT)).grammar
    good = ["hi {", "", PARIS.replace("arguments", "parameters")]
    assert [answer for answer in good if not accepts(tokens, tokenizer, text, answer)] == []
    assert not accepts(tokens, tokenizer, text, OSLO.replace("arguments", "parameters"))


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "none"}, {"tools": []}])
def test_answers_are_free_where_nothing_constrains_them(formats: Formats, fields: dict[str, Any]) -> None:
    assert constrained(formats("hermes", "qwen3"), asked(**fields)).grammar == ""


@pytest.mark.parametrize(
    ("is_open", "good", "bad"),
    [
        (True, ["hm</think>yes", "<think>hm</think>\n\nyes"], ["yes", "hm</think>maybe"]),
        (False, ["<think>hm yes</think>\nyes", "yes"], ["hm</think>yes", "<think>yes"]),
    ],
)
def test_constraint_holds_after_reasoning(
    formats: Formats, tokens: LLTokenizer, tokenizer: Tokenizer, is_open: bool, good: list[str], bad: list[str]
) -> None:
    request = asked([], structured_outputs={"choice": ["yes", "no}"]})
    text = constrained(formats(reasons="qwen3"), request, is_open).grammar
    assert [answer for answer in good if not accepts(tokens, tokenizer, text, answer)] == []
    assert [answer for answer in bad if accepts(tokens, tokenizer, text, answer)] == []


def test_marks_that_are_special_tokens_are_shown_and_spelled_by_their_ids(
    formats: Formats, tmp_path: Path, model_folder: Path
) -> None:
    saved = json.loads((model_folder / "tokenizer.json").read_text())
    for id_, mark in enumerate(["<tool_call>", "</tool_call>", "<think>", "</think>"], 300):
        token = {**saved["added_tokens"][0], "id": id_, "content": mark, "special": id_ != 301}
        saved["added_tokens"].append(token)
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = Tokenizer(tmp_path)
    form = MessageFormat(None, tokenizer, "hermes", "qwen3")
    request = constrained(form, asked(tool_choice="required"), True)
    assert request.shown_ids == {300, 302, 303}
    text = f"hm</think>{call(PARIS)}"
    assert accepts(grammar.ll_tokenizer(tokenizer, 310, [END]), tokenizer, request.grammar, text)
    assert constrained(form, asked([])).shown_ids == {302, 303}


# Which form


def test_choice_of_the_model_needs_a_known_form(formats: Formats) -> None:
    with pytest.raises(InvalidRequest, match=r"^tool_choice: auto needs to know .*--tool-call-parser"):
        formats("none").prepare(asked(), lambda _: pytest.fail("rendered"))
    assert constrained(formats("none"), asked(tool_choice="none")).grammar == ""


def test_bare_calls_and_constrained_content_are_not_told_apart(formats: Formats) -> None:
    with pytest.raises(InvalidRequest, match=r"^tool_choice: auto is not supported beside a constraint"):
        constrained(formats("llama3_json"), asked(response_format={"type": "json_object"}))


CHOICE = {"structured_outputs": {"choice": ["a"]}}


@pytest.mark.parametrize("choice", ["required", NOW])
@pytest.mark.parametrize("fields", [CHOICE, {"guided_regex": "a+"}])
def test_constraint_that_certain_calls_would_not_follow_is_refused(
    formats: Formats, choice: Any, fields: dict[str, Any]
) -> None:
    (name,) = fields
    with pytest.raises(InvalidRequest, match=f"^{name}: not with a tool_choice") as caught:
        constrained(formats(), asked(tool_choice=choice, **fields))
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tools"),  # it is of content, not of calls
        ({"tool_choice": NOW}, "tools"),
        ({"tools": [{**TOOLS[1], "function": {"name": "now", "strict": True}}]}, "tools"),
        ({"tool_choice": "none", **CHOICE}, "structured_outputs"),
        (CHOICE, "structured_outputs"),
        ({}, ""),
    ],
)
def test_constraint_is_the_field_that_the_grammar_comes_from(formats: Formats, fields: dict[str, Any], constraint: str) -> None:
    request = constrained(formats(reasons="qwen3"), asked(**fields))
    assert (request.constraint, bool(request.grammar)) == (constraint, bool(constraint))


def test_form_is_told_by_the_template_unless_it_is_given(formats: Formats) -> None:
    template = "{{ tools }}<tool_call></tool_call>"
    forms = [formats(name, template=template).call_form for name in NAMES]
    assert [form and form.name for form in forms] == ["hermes", None, "hermes", "llama3_json"]


@pytest.mark.parametrize(
    ("parser", "content", "reasoning"),
    [("deepseek_r1", "So far", None), ("qwen3", "<think>So far", "and on"), ("none", "<think>So far", None)],
)
def test_continued_message_tells_where_the_answer_begins(
    formats: Formats, parser: str, content: str, reasoning: str | None
) -> None:
    final = {"role": "assistant", "content": content}
    request = asked([], messages=[final], continue_final_message=True, add_generation_prompt=False)
    _, _, new_parser = formats(reasons=parser).prepare(request, lambda _: content)
    answer = new_parser()
    message = merged([*answer.feed("and on"), *answer.end()])
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, "" if reasoning else "and on")
