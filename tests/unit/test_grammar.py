from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from llguidance import LLParserLimits, LLTokenizer
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as HfTokenizer

import tpserve.grammar
from tests.unit.constrained import allowed, sample
from tests.unit.frontend.small import END
from tpserve.grammar import GrammarError, compile, first_mask, ll_tokenizer
from tpserve.tokenizer import Tokenizer

VOCABULARY = 310  # the tokenizer has 300
USER = 1  # id of <|user|>


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> LLTokenizer:
    return ll_tokenizer(tokenizer, VOCABULARY, [END, USER])


def ids_after(tokens: LLTokenizer, grammar: str, ids: list[int]) -> list[int]:
    matcher = compile(tokens, grammar)
    assert matcher.consume_tokens(ids)
    return allowed(matcher.compute_bitmask())


def test_mask_is_all_ids_that_spell_a_part_of_the_text(tokens: LLTokenizer, tokenizer: Tokenizer) -> None:
    for grammar in ('start: "the fox"', '%llguidance {"no_forcing": false}\nstart: "the fox"'):
        assert {tokenizer.piece(id_) for id_ in ids_after(tokens, grammar, [])} == {b"t", b"the"}


def test_mask_has_a_bit_for_every_id_of_the_model(tokens: LLTokenizer) -> None:
    assert len(compile(tokens, 'start: "a"').compute_bitmask()) == -(-VOCABULARY // 32) * 4


def test_stop_ids_alone_are_allowed_when_the_grammar_is_complete(tokens: LLTokenizer, tokenizer: Tokenizer) -> None:
    assert ids_after(tokens, 'start: "ab"', tokenizer.encode("ab", False)) == [END, USER]


def test_stop_ids_are_allowed_where_the_grammar_may_end_and_nowhere_else(tokens: LLTokenizer, tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a", False)
    assert not {END, USER} & set(ids_after(tokens, "start: /a{2,}/", [a]))
    assert {END, USER, a} <= set(ids_after(tokens, "start: /a{2,}/", [a, a]))


@pytest.mark.parametrize("stop", [END, USER])
def test_any_of_the_stop_ids_ends_the_answer(tokens: LLTokenizer, stop: int) -> None:
    matcher = compile(tokens, "start: /a*/")
    assert not matcher.is_stopped()
    assert matcher.consume_token(stop)
    assert matcher.is_stopped()


def test_grammar_that_is_complete_is_stopped_without_a_stop_id(tokens: LLTokenizer, tokenizer: Tokenizer) -> None:
    matcher = compile(tokens, 'start: "ab"')
    matcher.consume_tokens(tokenizer.encode("ab", False))
    assert matcher.is_stopped()
    assert not matcher.is_error()


def test_model_without_stop_ids_ends_where_nothing_can_follow(tokenizer: Tokenizer) -> None:
    tokens = ll_tokenizer(tokenizer, 300, [])
    assert tokens.vocab_size == 301
    assert ids_after(tokens, "start: /a?/", []) == [*tokenizer.encode("a", False), 300]
    assert sample(tokens, tokenizer, 'start: "ab"').is_complete


def test_any_text_is_spelled_by_no_special_id_and_by_none_without_bytes(tokens: LLTokenizer, tokenizer: Tokenizer) -> None:
    choice = ids_after(tokens, "start: /(?s:.)+/", [])
    assert not tokenizer.special_ids & set(choice)
    assert max(choice) < 300
    assert {b" ", b"\n", b"\xf0", b"\xc3"} < {tokenizer.piece(id_) for id_ in choice}


def test_name_of_a_special_id_is_spelled_in_letters(tokens: LLTokenizer, tokenizer: Tokenizer) -> None:
    answer = sample(tokens, tokenizer, f"start: {json.dumps('<|end|>')}")
    assert answer.text == "<|end|>"
    assert END not in answer.ids


def test_stop_id_that_is_no_special_token_spells_no_text(reference: HfTokenizer, tmp_path: Path) -> None:
    copy = HfTokenizer.from_str(reference.to_str())
    copy.add_tokens([AddedToken("</s>", special=False)])
    copy.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    answer = sample(ll_tokenizer(tokenizer, 301, [300]), tokenizer, 'start: "x</s>"')
    assert answer.text == "x</s>"
    assert 300 not in answer.ids


def test_bytes_that_are_no_text_are_not_allowed(tokens: LLTokenizer, tokenizer: Tokenizer) -> None:
    for seed in range(20):
        answer = sample(tokens, tokenizer, "start: /[éßあ-ん😀]{1,20}/", seed)
        assert re.fullmatch("[éßあ-ん😀]{1,20}", answer.text)


def test_tokenizer_of_byte_tokens_spells_what_it_has_no_piece_for(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}, "▁é": 258, "é": 259}
    copy = HfTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    copy.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    copy.add_special_tokens(["</s>", "<unk>"])
    copy.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    tokens = ll_tokenizer(tokenizer, 264, [1])
    texts = {sample(tokens, tokenizer, 'start: "é" " é" | "ß😀"', seed).text for seed in range(20)}
    assert texts == {"é é", "ß😀"}
    assert 0xFF + 2 not in ids_after(tokens, "start: /(?s:.)+/", [])


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("start: /a^b/", 'invalid regex "a^b" (in regex): lookarounds not supported yet'),
        ("start: /(a/", "unclosed group"),
        ("start: foo", 'unknown name: "foo"'),
        ('start: "a"\n\n\nnonsense', "Expected token ':'"),
        ('start: %json {"not": {}}', 'failed to compile JSON schema: Unimplemented keys: ["not"]'),
        ('start: %json {"not": {}, "x-guidance": {"lenient": true}}', 'Unimplemented keys: ["not"]'),
        ('start: %json {"format": "ssn", "type": "string"}', "Unknown format: ssn"),
        ('{"grammars": [{"lark_grammar": "start: /a/"}]}', "trailing characters"),
        ("start: <|none|>", "<|none|>"),
        ('start: %json {"enum": [' + ",".join(['"' + "x" * 300 + '"'] * 9) + '], "not": {}}', "Unimplemented"),
    ],
)
def test_grammar_that_cannot_be_used_says_why_in_a_line(tokens: LLTokenizer, grammar: str, said: str) -> None:
    with pytest.raises(GrammarError) as error:
        compile(tokens, grammar)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert "no_forcing" not in str(error.value)
    assert len(str(error.value)) <= 301


@pytest.mark.parametrize("grammar", ['start: %json {"$ref": "#"}', "start: A\nA: /a/ & /b/", "start: a\na: a"])
def test_grammar_that_no_text_fits_is_refused(tokens: LLTokenizer, grammar: str) -> None:
    with pytest.raises(GrammarError, match=r"^no text fits it$"):
        first_mask(tokens, grammar)


def test_grammar_whose_first_mask_takes_too_much_is_refused(tokens: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    first_mask(tokens, "start: /[a-z]{9}x?/")
    monkeypatch.setattr(tpserve.grammar, "LIMITS", LLParserLimits(step_lexer_fuel=1))
    with pytest.raises(GrammarError, match="lexer error"):
        first_mask(tokens, "start: /[a-z]{9}x?/")
