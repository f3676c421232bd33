"""Grammars: which ids may come next, so that an answer has the form that was asked for. The work is llguidance's.

A grammar is the text of a Lark grammar as llguidance takes it; its `%json` nodes hold JSON schemas. The frontend's
child compiles one first, the coordinator then generates by it: both by what is in here, so that both find the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from tpserve.tokenizer import Tokenizer

# A mask is all ids that the grammar allows. Else llguidance allows only one spelling of a text that is forced, for which
# it would have to call the tokenizer from within. The last word on an option counts: it follows the client's grammar.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_MOST_SHOWN = 300  # characters of what the compiler says
_REPEATED = re.compile(r"^ *(\d+ \| .*|\^)$", re.MULTILINE)

# What one grammar may cost. Fuel and items bound the time of each mask (to about 20 ms), states the memory of an
# answer (to about 15 MB). The time of a compilation has no bound in here.
LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False)


class GrammarError(ValueError):
    """A grammar that cannot be used; the message is one line for its author."""


class _Vocabulary:
    """A tokenizer as llguidance wants it: the bytes of each id."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]):
        self.tokens = [tokenizer.piece(id_) for id_ in range(vocab_size)]  # an id without bytes is never allowed
        self.special_token_ids = sorted(tokenizer.special_ids.union(stop_ids))  # they spell no text, whatever their name is
        self.eos_token_id = stop_ids[0] if stop_ids else None  # None: one more, that the model does not have
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenizes: only texts that are forced, and none is (`_OPTIONS`)."""
        return []


def ll_tokenizer(tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]) -> LLTokenizer:
    """The ids 0 to vocab_size - 1 for `compile`; takes about a second for 250k of them.

    `stop_ids` end the answer: they are allowed where the grammar is complete, and nowhere else. Masks have vocab_size
    bits (`LLTokenizer.vocab_size` tells); without stop ids one more, for the end that is not sampled.
    """
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, stop_ids)), eos_token=list(stop_ids) or None)


def compile(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the grammar's beginning. Raises GrammarError with what is wrong.

    Its copies share an automaton that grows with each, up to `LIMITS`: they are for the choices of one request.
    """
    matcher = LLMatcher(tokenizer, grammar + _OPTIONS, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(_line(matcher.get_error()))
    if warnings := matcher.get_grammar_warnings():  # such as of keywords that a lenient schema ignores
        raise GrammarError(_line("; ".join(warnings)))
    return matcher


def first_mask(tokenizer: LLTokenizer, grammar: str) -> None:
    """Compile a grammar, and look for the ids that an answer can begin with. Raises GrammarError if that fails."""
    matcher = compile(tokenizer, grammar)
    matcher.compute_bitmask()
    if matcher.is_error():
        said = _line(matcher.get_error())
        raise GrammarError("no text fits it" if said == "NoExtensionBias" else said)


def _line(said: str) -> str:
    """What the compiler says, in one line, without its state and the lines of the grammar that it repeats."""
    said = re.split("<backtrace>|<state>|<non-verbose/>", said)[0].removeprefix("at 1(8): ")  # where ours have all
    text = " ".join(_REPEATED.sub("", said).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
