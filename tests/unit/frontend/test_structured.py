from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from tests.unit.constrained import Answer, sample
from tests.unit.frontend.small import END
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.structured import (
    MAX_BYTES,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_EBNF_BYTES,
    grammar_of,
    json_node,
    literal,
)
from tpserve.grammar import compile, ll_tokenizer
from tpserve.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["é", '"', "a\nb", "<|end|>"]}, "maxItems": 3},
        "boss": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/boss"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {"boss": {"type": "object", "properties": {"since": {"type": "string", "pattern": "^[12]\\d{3}$"}}}},
}
ENDS = (b'"', b"}", b"]", b",", b"1")  # of the parts of JSON


def named(schema: object, **more: object) -> dict[str, Any]:
    """OpenAI's response_format of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def nested(depth: int) -> dict[str, Any]:
    """A schema that nests so deep."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> LLTokenizer:
    return ll_tokenizer(tokenizer, 310, [END])


@pytest.fixture(scope="module")
def answered(tokens: LLTokenizer, tokenizer: Tokenizer) -> Any:
    """(seed, fields) -> an answer to them, of ids that are drawn at random with some liking for what ends JSON."""

    def answer(seed: int, **fields: Any) -> Answer:
        return sample(tokens, tokenizer, grammar_of(fields)[1], seed, likes=lambda piece: piece in ENDS)

    return answer


# What is asked for is what comes


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_json_object_gives_an_object(answered: Any, fields: dict[str, Any]) -> None:
    answers = [answered(seed, **fields) for seed in range(30)]
    assert all(isinstance(json.loads(answer.text), dict) for answer in answers)
    assert len({answer.text for answer in answers}) > 5


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": named(PERSON, strict=True, description="someone")},
        {"response_format": named(PERSON, strict=False)},
        {"response_format": named(PERSON)},
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON)}},
        {"guided_json": PERSON},
    ],
)
def test_json_schema_gives_json_of_that_schema(answered: Any, fields: dict[str, Any]) -> None:
    for seed in range(10):
        jsonschema.validate(json.loads(answered(seed, **fields).text), PERSON)


SCALARS = st.one_of(
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, st.integers(-999, 999), st.integers(0, 99)
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, st.integers(0, 5), st.integers(0, 5)
    ),
    st.lists(st.text(max_size=5) | st.integers(-(10**6), 10**6) | st.booleans(), min_size=1, max_size=4).map(
        lambda v: {"enum": v}
    ),
    st.builds(lambda value: {"const": value}, st.none() | st.text(max_size=9) | st.integers(-5, 5)),
    st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(lambda f: {"type": "string", "format": f}),
    st.sampled_from(["^a+b?$", "x", "^[A-Z]{2}-\\d+$", "a|b"]).map(lambda p: {"type": "string", "pattern": p, "maxLength": 20}),
    st.sampled_from(
        [{"type": "boolean"}, {"type": ["null", "boolean"]}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1}]
    ),
    st.sampled_from([2, 7, 0.5]).map(lambda factor: {"type": "integer", "multipleOf": factor, "minimum": 0, "maximum": 9999}),
)


def compounds(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    objects = st.builds(
        lambda fields, needed: {
            "type": "object",
            "properties": fields,
            "required": [name for name, is_needed in zip(fields, needed) if is_needed],
            "additionalProperties": False,
        },
        st.dictionaries(st.text(max_size=6), inner, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4),
    )  # fmt: skip
    return lists | objects | st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})


@settings(max_examples=80, deadline=None)
@given(schema=st.recursive(SCALARS, compounds, max_leaves=6), seed=st.integers(0, 10**6))
def test_json_of_any_schema_is_valid(answered: Any, schema: dict[str, Any], seed: int) -> None:
    answer = answered(seed, structured_outputs={"json": schema})
    assert answer.is_complete
    jsonschema.validate(json.loads(answer.text), schema)


@pytest.mark.slow
def test_json_of_a_large_vocabulary_is_valid(demo_model: Path) -> None:
    tokenizer = Tokenizer(demo_model)
    tokens = ll_tokenizer(tokenizer, 49152, [2, 0])
    for seed in range(6):
        answer = sample(tokens, tokenizer, grammar_of({"guided_json": PERSON})[1], seed, likes=lambda piece: piece in ENDS)
        jsonschema.validate(json.loads(answer.text), PERSON)
        assert not tokenizer.special_ids & set(answer.ids)


@pytest.mark.parametrize("regex", [r"\d{3}-[a-f]+", r"^\d{3}-[a-f]+$", r"^\d{3}-[a-f]+"])
def test_regex_matches_the_whole_answer(answered: Any, regex: str) -> None:
    for seed in range(10):
        assert re.fullmatch("[0-9]{3}-[a-f]+", answered(seed, structured_outputs={"regex": regex}).text)


@pytest.mark.parametrize(
    ("regex", "text"),
    [(r"a\$", "a$"), (r"^a\\$", "a\\"), (r"\^a", "^a"), ("a/b", "a/b"), ("//", "//"), ('"#', '"#'), ("a\nb", "a\nb")],
)
def test_regex_of_odd_characters_is_taken_as_written(answered: Any, regex: str, text: str) -> None:
    assert answered(0, guided_regex=regex).text == text


@pytest.mark.parametrize("name", ["guided_choice", "structured_outputs"])
def test_choice_gives_one_of_the_texts_and_each(answered: Any, name: str) -> None:
    choices = ["a", "ab", "", "été", "<|end|>", 'a"b\\', "a\n", "😀", "/x/ // #"]
    asked = {name: choices if name == "guided_choice" else {"choice": [*choices, "a"]}}
    assert {answered(seed, **asked).text for seed in range(150)} == set(choices)


@pytest.mark.parametrize("grammar", ['start: "a" B{3}\nB: "b"', 'root ::= "a" x\nx ::= "b"{3}', "start: /a::=b/ | /abbb/"])
def test_grammar_may_be_lark_or_ebnf(answered: Any, grammar: str) -> None:
    answers = {answered(seed, structured_outputs={"grammar": grammar}).text for seed in range(9)}
    assert answers in ({"abbb"}, {"abbb", "a::=b"})
    assert answers == {answered(seed, guided_grammar=grammar).text for seed in range(9)}


# White space


def blanks(tokens: LLTokenizer, tokenizer: Tokenizer, fields: dict[str, Any]) -> str:
    """An answer that has as many blanks as it can."""
    return sample(tokens, tokenizer, grammar_of(fields)[1], limit=9999, likes=lambda piece: not piece.strip(b" \n\t\r")).text


@pytest.mark.parametrize("schema", [{"type": "object"}, PERSON, {"type": "array", "items": {"type": "array"}, "minItems": 5}])
def test_json_has_no_long_run_of_blanks(tokens: LLTokenizer, tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    structure = re.sub(r'"(\\.|[^"\\])*"', '""', blanks(tokens, tokenizer, {"guided_json": schema}))
    assert max(map(len, re.findall(r"\s+", structure)), default=0) <= 21


def test_json_may_be_laid_out_as_models_do(tokens: LLTokenizer, tokenizer: Tokenizer) -> None:
    value = {"a": [1, {"b": None}], "c": {}}
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))):
        matcher = compile(tokens, grammar_of({"response_format": {"type": "json_object"}})[1])
        assert matcher.consume_tokens(tokenizer.encode(text, False))
        assert matcher.is_stopped()


def test_white_space_is_as_vllms_options_say(tokens: LLTokenizer, tokenizer: Tokenizer) -> None:
    compact = {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}
    assert not re.search(r"[\[{,:}\]]\s", re.sub(r'"(\\.|[^"\\])*"', '""', blanks(tokens, tokenizer, compact)))
    patterned = {"structured_outputs": {"json_object": True, "whitespace_pattern": "\\t"}}
    assert re.fullmatch(r'\{\t?(".*"\t?:.*)?\}', blanks(tokens, tokenizer, patterned), re.DOTALL)


# What is refused


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"temperature": 1},
    ],
)
def test_body_without_a_constraint_has_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(fields) == ("", "")


def test_field_that_the_grammar_comes_from_is_told() -> None:
    assert grammar_of({"response_format": {"type": "text"}, "guided_regex": "a"})[0] == "guided_regex"
    assert grammar_of({"response_format": {"type": "json_object"}, "guided_regex": None})[0] == "response_format"
    assert grammar_of({"response_format": {"type": "text"}})[0] == ""


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": 5}, "response_format: must be an object"),
    ({"response_format": {}}, "response_format.type: None is not supported; text, json_object and json_schema are"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type: 'structural_tag' is not supported"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema: is not supported"),
    ({"response_format": {"type": "json_object", "indent": 0}}, "response_format.indent: is not supported"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: must be an object"),
    ({"response_format": named(None)}, "response_format.json_schema.schema: must be an object: a JSON schema"),
    ({"response_format": named(True)}, "response_format.json_schema.schema: must be an object: a JSON schema"),
    ({"response_format": named({}, name=None)}, "response_format.json_schema.name: must be a string"),
    ({"response_format": named({}, name="")}, "response_format.json_schema.name: must be a string"),
    ({"response_format": named({}, strict="yes")}, "response_format.json_schema.strict: must be true or false"),
    ({"response_format": named({}, lenient=True)}, "response_format.json_schema.lenient: is not supported"),
    ({"response_format": named({"x-guidance": {"lenient": True}})}, "x-guidance is not supported"),
    ({"response_format": named({"minimum": float("nan")})}, "NaN and infinities are no JSON"),
    ({"guided_json": {"const": 2**53 + 1}}, "the number 9007199254740993 would not be exact"),
    ({"guided_json": {"items": {"enum": [1, -(10**22)]}}}, "the number -10000000000000000000000 would not be exact"),
    ({"guided_regex": "abc\\"}, "ends with a backslash that escapes nothing"),
    ({"response_format": named(nested(MAX_DEPTH + 1))}, f"nests deeper than {MAX_DEPTH}, which is the most"),
    ({"response_format": named({"title": "x" * MAX_BYTES})}, f"has {MAX_BYTES + 13} bytes; {MAX_BYTES} is the most"),
    ({"structured_outputs": []}, "structured_outputs: must be an object"),
    ({"structured_outputs": {}}, "must have one of json, regex, choice, grammar and json_object; it has none"),
    ({"structured_outputs": {"json_object": False}}, "it has none"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "it has json and regex"),
    ({"structured_outputs": {"regex": "a", "max_whitespace": 0}}, "structured_outputs.max_whitespace: is not supported"),
    ({"structured_outputs": {"regex": 0}}, "structured_outputs.regex: must be a string, and not empty"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": 0}}, "structured_outputs.whitespace_pattern: must be a string"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object: must be true or false"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: is not valid JSON: "),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json: must be an object: a JSON schema"),
    ({"structured_outputs": {"json": "[" * 70000}}, f"has 70000 bytes; {MAX_BYTES} is the most"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag: is not supported"),
    ({"structured_outputs": {"regex": "a", "disable_additional_properties": True}}, "disable_additional_properties: is not"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern: only with json or json_object"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": 5}}, "structured_outputs.whitespace_pattern: must be a string"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}}, "give one of them"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex: must be a string, and not empty"),
    ({"guided_regex": ""}, "guided_regex: must be a string, and not empty"),
    ({"guided_regex": "x" * (MAX_BYTES + 1)}, f"guided_regex: has {MAX_BYTES + 1} bytes; {MAX_BYTES} is the most"),
    ({"guided_choice": []}, "guided_choice: must be a list of strings, and not empty"),
    ({"guided_choice": ["a", 5]}, "guided_choice: must be a list of strings, and not empty"),
    ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, f"has {MAX_CHOICES + 1} choices; {MAX_CHOICES} is the most"),
    ({"guided_choice": ["é" * 20000] * 2}, f"has 80000 bytes; {MAX_BYTES} is the most"),
    ({"guided_grammar": " \n"}, "guided_grammar: must be a string, and not empty"),
    (
        {"guided_grammar": "start: a\na[capture, temperature=0.7]: /x/"},
        "guided_grammar: temperature of a rule is not supported",
    ),
    ({"guided_grammar": 'start: a\na[stop="x"]: /.*/'}, "guided_grammar: stop of a rule is not supported"),
    ({"guided_grammar": 'root ::= "a'}, "guided_grammar: is no EBNF: Unexpected end of input at line 1"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar: is no EBNF: Rule 'x' not found"),
    ({"guided_grammar": 'x ::= "a"'}, "guided_grammar: is no EBNF: No 'root' rule found"),
    ({"guided_grammar": "root ::= " + "(" * 5000}, "guided_grammar: nests too deep"),
    ({"guided_grammar": "root ::= " + '"a" ' * 9000}, f"has 36009 bytes; {MAX_EBNF_BYTES} is the most"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "response_format and guided_json: an answer has one"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_constraint_that_is_wrong_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        grammar_of(fields)
    assert said in error.value.message
    assert "\n" not in error.value.message
    assert error.value.param in fields


def test_schema_as_large_and_deep_as_allowed_is_taken(tokens: LLTokenizer) -> None:
    for schema in (nested(MAX_DEPTH), {"title": "x" * (MAX_BYTES - 13)}):
        compile(tokens, grammar_of({"guided_json": schema})[1])


def test_parts_of_a_grammar_are_for_others_to_join(tokens: LLTokenizer, tokenizer: Tokenizer) -> None:
    grammar = f"start: {literal('<call>é')} {json_node({'const': 'é'})} {literal('</call>')}"
    assert sample(tokens, tokenizer, grammar).text == '<call>é"é"</call>'
