from __future__ import annotations

import pytest
from tokenizers import pre_tokenizers

from tpserve.byte_level import BYTES, CHARACTERS, spelled


def test_every_byte_has_a_character_of_its_own() -> None:
    assert set(CHARACTERS) == set(pre_tokenizers.ByteLevel.alphabet())
    assert [BYTES[char] for char in CHARACTERS] == list(range(256))


def test_text_is_spelled_as_the_library_spells_it() -> None:
    text = "a é\n日本👍\x00\x7f\xa0\xad"
    ((token, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert "".join(CHARACTERS[byte] for byte in text.encode()) == token
    assert spelled(token) == text.encode()


@pytest.mark.parametrize("other", [" ", "\x00", "\x7f", "\xa0", "\xad", "\u0144", "日"])
def test_token_with_a_character_that_spells_no_byte_spells_none(other: str) -> None:
    assert spelled("ab") == b"ab"
    assert spelled(f"a{other}b") is None
