"""Tokenizers put together from what other formats keep: tokens with their kinds and scores, merges, ways to split text.

Two designs serve all families. A byte-level one splits the text into words by a rule, spells their bytes as characters and
merges within each word. One of SentencePiece marks spaces, merges over the whole text, and spells what it has no piece for
in byte tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

MARK = "▁"  # U+2581, SentencePiece's spelling of a space
Merges = list[tuple[str, str]]


class Kind(IntEnum):
    """What a token is: SentencePiece's numbers, which GGUF has taken over."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Split:
    """How a byte-level tokenizer cuts a text into words."""

    pattern: str | None = None  # None: GPT-2's, which the library has
    digits: bool = False  # each digit by itself first
    nfc: bool = False  # the text is composed before
    whole_words: bool = False  # a word that is a token stays whole, whatever the merges make of it


_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CASELESS}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_CASELESS}|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# By GGUF's names (tokenizer.ggml.pre). A model's own tokenizer decides about NFC, which llama.cpp leaves out.
SPLITS = {
    "gpt-2": Split(),
    "mpt": Split(nfc=True),  # GPT-NeoX
    "olmo": Split(nfc=True),
    "smollm": Split(digits=True),
    "starcoder": Split(digits=True),
    "refact": Split(digits=True),
    "command-r": Split(digits=True, nfc=True),
    "llama-bpe": Split(_LLAMA3, whole_words=True),
    "llama3": Split(_LLAMA3, whole_words=True),
    "llama-v3": Split(_LLAMA3, whole_words=True),
    "smaug-bpe": Split(_LLAMA3),
    "tekken": Split(_TEKKEN, whole_words=True),
    "qwen2": Split(_QWEN2, nfc=True),
    "deepseek-r1-qwen": Split(_QWEN2),
}


def byte_level(vocab: dict[str, int], merges: Merges, split: Split, prefix: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer; `prefix`: what begins with no space gets one in front.

    Raises what the library raises if a merge is not of two tokens that make a third.
    """
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    first: list[pre_tokenizers.PreTokenizer] = []
    if split.digits:
        # Before GPT-2's rule, which would else leave a space on a digit that stood without one in training.
        first.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        first.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split.pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(
    model: models.Model, prefix: bool, first: Sequence[normalizers.Normalizer] = (), once: bool = False
) -> Tokenizer:
    """A tokenizer over a model with SentencePiece's spaces; `prefix`: text gets one in front, `first`: what is done before.

    Text after an added token counts as a beginning, too: as with Llama 2's own file, and with llama.cpp. With `once` it
    does not, nor does a text that begins with a space get another: what transformers calls not legacy.
    """
    tokenizer = Tokenizer(model)
    prepend = [normalizers.Prepend(MARK)] if prefix and not once else []
    tokenizer.normalizer = normalizers.Sequence([*first, *prepend, normalizers.Replace(" ", MARK)])
    if prefix and once:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="first", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def sentencepiece_bpe(texts: Sequence[str], kinds: Sequence[int], scores: Sequence[float], unknown: int | None) -> models.BPE:
    """SentencePiece's BPE model: of two neighbours the pair is merged first that makes the token of the highest score."""
    vocab = {text: id_ for id_, (text, kind) in enumerate(zip(texts, kinds)) if kind != Kind.UNUSED}
    normal = {text: vocab[text] for text, kind in zip(texts, kinds) if kind == Kind.NORMAL}
    by_score = sorted(normal, key=lambda text: -scores[normal[text]])  # equal scores: by id, the order in which they were found
    unk_token = None if unknown is None else texts[unknown]
    return models.BPE(vocab, pairs(by_score, normal), unk_token=unk_token, fuse_unk=True, byte_fallback=Kind.BYTE in kinds)


def pairs(texts: Iterable[str], known: Mapping[str, int]) -> Merges:
    """The merges behind tokens of which only the order is known: all pairs of known tokens that make each, in its place."""
    merges: Merges = []
    for text in texts:
        splits = ((text[:place], text[place:]) for place in range(1, len(text)))
        found = [(known[left], known[right], left, right) for left, right in splits if left in known and right in known]
        merges += [(left, right) for *_, left, right in sorted(found)]
    return merges


def added(texts: Iterable[str], kinds: Iterable[int]) -> list[AddedToken]:
    """Tokens that are found in the text as they are spelled, before all else."""
    whole = (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)
    return [
        AddedToken(text, normalized=False, special=kind != Kind.USER_DEFINED)
        for text, kind in zip(texts, kinds)
        if kind in whole
    ]


def surround(tokenizer: Tokenizer, begin: str | None, end: str | None) -> None:
    """Have the tokenizer put these tokens around a text when special tokens are asked for."""
    if ends := [token for token in (begin, end) if token is not None]:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[token for token in (begin, "$A", end) if token is not None],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(ends)],
        )
