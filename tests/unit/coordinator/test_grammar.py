"""Grammars over the small tokenizer, as llguidance understands them."""

from __future__ import annotations

import json
import re
import select
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tests.unit.coordinator.model_worker import make_submit
from tests.unit.frontend import small
from tests.unit.frontend.small import END
from tpserve.coordinator.grammar import Compiler, GrammarMatcher, Grammars
from tpserve.grammar import GrammarError, compile
from tpserve.messages import Abort, Finish, Refusal
from tpserve.settings import UserError
from tpserve.tokenizer import Tokenizer

VOCAB = 310  # ten more than the tokenizer has
WORDS = -(-VOCAB // 32)
LIMIT_S = 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(small.write(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, VOCAB, (END,))


def begin(compiler: Compiler, grammar: str, *generated: int) -> GrammarMatcher:
    (matcher,) = compiler.matchers(make_submit(2, [1], choices={0: list(generated)}, grammar=grammar))
    return matcher


def regex(pattern: str) -> str:
    return f"start: /{pattern}/"


def allowed(matcher: GrammarMatcher) -> list[int]:
    words = np.zeros(WORDS, np.uint32)
    matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def write(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> Finish:
    """Have it take the text's ids, each of which the mask allows; how that ends."""
    finish = Finish.NONE
    for id_ in tokenizer.encode(text, add_special_tokens=False):
        assert finish is Finish.NONE
        assert id_ in allowed(matcher)
        finish = matcher.accept(id_)
    return finish


def test_mask_allows_what_may_follow_and_the_end_where_it_may_end(compiler: Compiler, tokenizer: Tokenizer) -> None:
    matcher = begin(compiler, regex("[0-9]{2,3}"))
    digits = [tokenizer.id_of(digit) for digit in "0123456789"]
    assert allowed(matcher) == digits
    assert write(matcher, tokenizer, "12") is Finish.NONE
    assert allowed(matcher) == [END, *digits]
    assert write(matcher, tokenizer, "3") is Finish.COMPLETE


def test_end_id_ends_where_the_grammar_may_end(compiler: Compiler, tokenizer: Tokenizer) -> None:
    matcher = begin(compiler, regex("a*"))
    write(matcher, tokenizer, "aa")
    assert matcher.accept(END) is Finish.STOP


def test_every_end_id_ends(tokenizer: Tokenizer) -> None:
    other = tokenizer.id_of("<|user|>")
    assert other is not None
    matcher = begin(Compiler(tokenizer, VOCAB, (END, other)), regex("a*"))
    assert {END, other} < set(allowed(matcher))
    assert matcher.accept(other) is Finish.STOP


def test_grammar_may_name_a_special_token(compiler: Compiler, tokenizer: Tokenizer) -> None:
    matcher = begin(compiler, 'start: <|user|> "x"')
    id_ = tokenizer.id_of("<|user|>")
    assert allowed(matcher) == [id_]
    assert id_ is not None
    assert matcher.accept(id_) is Finish.NONE
    assert write(matcher, tokenizer, "x") is Finish.COMPLETE


def test_free_text_has_no_special_ids_nor_any_that_the_tokenizer_lacks(compiler: Compiler, tokenizer: Tokenizer) -> None:
    ids = allowed(begin(compiler, regex("(?s:.*)")))
    assert END in ids
    assert not {*ids} & ({*tokenizer.special_ids, *range(300, VOCAB)} - {END})


def test_text_that_spells_an_end_id_is_written_without_it(compiler: Compiler, tokenizer: Tokenizer) -> None:
    matcher = begin(compiler, regex(r"<\|end\|>"))
    text = b""
    finish = Finish.NONE
    while finish is Finish.NONE:
        id_ = allowed(matcher)[0]
        text += tokenizer.piece(id_)
        finish = matcher.accept(id_)
        assert id_ != END
    assert (text, finish) == (b"<|end|>", Finish.COMPLETE)


def test_json_schema_is_followed_to_its_end(compiler: Compiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"], "additionalProperties": False}
    matcher = begin(compiler, f"start: %json {json.dumps(schema)}")
    assert write(matcher, tokenizer, '{"é": 12') is Finish.NONE
    assert END not in allowed(matcher)
    assert write(matcher, tokenizer, "}") is Finish.COMPLETE


def test_generated_ids_are_taken_before(compiler: Compiler, tokenizer: Tokenizer) -> None:
    grammar, ids = regex("the (fox|dog)"), tokenizer.encode("the ", add_special_tokens=False)
    resumed, fresh = begin(compiler, grammar, *ids), begin(compiler, grammar)
    write(fresh, tokenizer, "the ")
    assert allowed(resumed) == allowed(fresh)


def test_generated_ids_that_do_not_follow_the_grammar_are_refused(compiler: Compiler, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("no", add_special_tokens=False)
    with pytest.raises(GrammarError, match="the 2 ids generated so far do not follow it"):
        begin(compiler, regex("the"), *ids)


def test_choices_of_one_grammar_go_their_own_ways(compiler: Compiler, tokenizer: Tokenizer) -> None:
    first, second = compiler.matchers(make_submit(2, [1], choices={0: [], 1: []}, grammar=regex("[ab]c")))
    write(first, tokenizer, "a")
    assert allowed(first) == [tokenizer.id_of("c")]
    assert allowed(second) == [tokenizer.id_of("a"), tokenizer.id_of("b")]


def test_model_without_end_ids_ends_where_nothing_can_follow(tokenizer: Tokenizer) -> None:
    matcher = begin(Compiler(tokenizer, 320, ()), regex("ab?"))  # 320 is a whole number of words
    assert allowed(matcher) == [tokenizer.id_of("a")]
    assert write(matcher, tokenizer, "a") is Finish.NONE
    assert allowed(matcher) == [tokenizer.id_of("b")]
    assert write(matcher, tokenizer, "b") is Finish.COMPLETE


def test_matcher_that_gives_up_allows_everything_and_ends_with_the_next_id(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpserve.grammar.LIMITS", LLParserLimits(max_lexer_states=40))
    matcher = begin(Compiler(tokenizer, VOCAB, (END,)), regex("(a|b)*a(a|b){12}"))
    finish, text = Finish.NONE, "abbabaabbaababbabababbaabbbababaabbaabab" * 4
    ids = iter(tokenizer.encode(text, add_special_tokens=False))
    while finish is Finish.NONE:
        may = allowed(matcher)
        finish = matcher.accept(next(ids))
    assert finish is Finish.TOO_COMPLEX
    assert len(may) == 32 * WORDS


# Beside the loop


@pytest.fixture
def grammars(tmp_path: Path) -> Grammars:
    return Grammars(small.deployment(small.write(tmp_path)))


def taken(grammars: Grammars, last: int) -> list[tuple[int, int, str, list[int]]]:
    """(request, number of matchers, reason, aborted choices) of all that are done until request `last` is."""
    found = []
    while not found or found[-1][0] != last:
        assert select.select([grammars], [], [], LIMIT_S)[0], "no grammar was compiled"
        done = grammars.take()
        found += [(one.submit.request, len(one.matchers), one.reason, one.aborted) for one in done]
    return found


def test_submits_come_back_with_their_matchers_in_order_of_arrival(grammars: Grammars) -> None:
    for request in (4, 2):
        grammars.add(make_submit(request, [1], choices={0: [], 3: []}, grammar=regex("a*")), 1.5)
    assert taken(grammars, 2) == [(4, 2, "", []), (2, 2, "", [])]


def test_request_that_is_aborted_before_it_was_taken_never_comes_back(grammars: Grammars) -> None:
    for request in (2, 4):
        grammars.add(make_submit(request, [1], choices={0: [], 1: []}, grammar=regex("a*")), 0.0)
    assert grammars.abort(Abort(2, -1))
    assert grammars.abort(Abort(4, 1))
    assert taken(grammars, 4) == [(4, 2, "", [1])]
    assert not grammars.abort(Abort(4, -1))


@pytest.mark.parametrize("grammar", ["start: /(/", "no grammar", 'start: %json {"type": "bull"}'])
def test_grammar_that_does_not_compile_comes_back_with_a_line_that_says_why(grammars: Grammars, grammar: str) -> None:
    grammars.add(make_submit(2, [1], grammar=grammar), 0.0)
    ((_, num_matchers, reason, _),) = taken(grammars, 2)
    assert re.fullmatch(r"the grammar cannot be used: [^\n]+", reason)
    assert not num_matchers


def test_tokenizer_that_cannot_be_read_is_raised_where_the_loop_takes(tmp_path: Path) -> None:
    small.write(tmp_path)
    deployment = small.deployment(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    grammars = Grammars(deployment)
    assert select.select([grammars], [], [], LIMIT_S)[0]
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        grammars.take()


def test_grammar_of_a_group_is_compiled_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def count(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
        compiled.append(grammar)
        return compile(vocabulary, grammar)

    monkeypatch.setattr("tpserve.coordinator.grammar.compile", count)
    for request, group, grammar in ((1, 101, "a"), (2, 101, "a"), (3, 102, "a"), (4, 102, "b"), (5, 102, "b")):
        compiler.matchers(make_submit(request, [1], choices={0: [], 1: []}, group=group, grammar=regex(grammar)))
    assert compiled == [regex("a"), regex("a"), regex("b")]


def test_requests_beyond_those_that_may_wait_for_their_grammars_are_refused(grammars: Grammars) -> None:
    # The first one's grammar keeps the thread busy, or is done: either way no more than that have come back.
    refused = [grammars.add(make_submit(n, [1], group=n // 2, grammar=regex(f"a{{{n}}}")), 0.0) for n in range(2, 2 * 66)]
    assert [one.kind for one in refused if one is not None] == [Refusal.QUEUE_FULL] * 2
    assert [one.request for one in refused if one is not None] == [130, 131]
