"""Model folders without tokenizer.json: it is made of tokenizer.model, or of vocab.json and merges.txt."""

from __future__ import annotations

import base64
import binascii
import json
import re
import shutil
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tpserve.byte_level import CHARACTERS
from tpserve.checkpoint.folder import architecture, read_json, special_tokens, token_text, tokenizer_config
from tpserve.checkpoint.tokenizer import build, sentencepiece_model
from tpserve.checkpoint.tokenizer.build import MARK, SPLITS, Kind
from tpserve.settings import UserError

Added = dict[int, AddedToken]

_REMEDY = "give the model's tokenizer.json"
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # a token in base64, its rank
# How text is split is in neither of these forms; it follows from the model's class. Llama models with vocab.json are of
# several makers, who split differently.
_TIKTOKEN_SPLITS = {"LlamaForCausalLM": "llama-bpe"}
_VOCAB_SPLITS = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen2",
    "CohereForCausalLM": "command-r",
    "GPTNeoXForCausalLM": "mpt",
}


def convert(model: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a model folder into `folder`, which exists.

    Raises UserError for a tokenizer that is not supported or broken.
    """
    config = tokenizer_config(model)
    special = _special(model, config)
    extra = _added_tokens(model, config, special)
    path = model / "tokenizer.model"
    if not path.exists():
        tokenizer, begins = _from_vocab(model, extra, special, _flag(model, config, "add_prefix_space", False)), False
    elif _TIKTOKEN.match(path.read_bytes()):
        tokenizer, begins = _from_tiktoken(path, extra), True
    else:
        sentences = sentencepiece_model.read(path)
        sentences.prefix = _flag(model, config, "add_prefix_space", sentences.prefix)
        sentences.once = not _flag(model, config, "legacy", True)
        tokenizer = _from_sentencepiece(sentences, path, extra)
        begins, config = True, sentences.names() | config
    begin = _named(model, config, "bos_token") if _flag(model, config, "add_bos_token", begins) else None
    end = _named(model, config, "eos_token") if _flag(model, config, "add_eos_token", False) else None
    for token in (begin, end):
        if token is not None and tokenizer.token_to_id(token) is None:
            raise UserError(f"{model / 'tokenizer_config.json'}: the tokenizer has no token {token!r}; {_REMEDY}")
    build.surround(tokenizer, begin, end)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if (template := model / "chat_template.jinja").exists():
        shutil.copyfile(template, folder / template.name)


def _special(model: Path, config: dict[str, Any]) -> set[str]:
    """The tokens that are no text: those with a name, and more that the config lists."""
    place = "extra_special_tokens" if config.get("extra_special_tokens") else "additional_special_tokens"
    more = config.get(place) or []
    tokens = more if isinstance(more, list) else more.values() if isinstance(more, dict) else [more]
    return {*special_tokens(model).values(), *(token_text(model, place, token) for token in tokens)}


def _flag(model: Path, config: dict[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise UserError(f"{model / 'tokenizer_config.json'}: {name} is {value!r}; it must be true or false")
    return default if value is None else value


def _named(model: Path, config: dict[str, Any], name: str) -> str | None:
    return None if config.get(name) is None else token_text(model, name, config[name])


def _added_tokens(model: Path, config: dict[str, Any], special: Set[str]) -> Added:
    """Tokens that the folder's settings add to those of its vocabulary, or put in their place, by id.

    `added_tokens_decoder` of tokenizer_config.json says how each is found; added_tokens.json, which is older, does not.
    """
    found = {}
    try:
        for text, id_ in read_json(model / "added_tokens.json", required=False).items():
            found[int(id_)] = AddedToken(text, normalized=False, special=text in special)
        for id_, token in config.get("added_tokens_decoder", {}).items():
            options = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "single_word")}
            is_special = bool(token.get("special", False)) or token["content"] in special
            found[int(id_)] = AddedToken(token["content"], normalized=False, special=is_special, **options)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{model}: added tokens cannot be read ({type(error).__name__}: {error}); {_REMEDY}") from None
    return dict(sorted(found.items()))


def _from_sentencepiece(model: sentencepiece_model.Model, path: Path, extra: Added) -> Tokenizer:
    added = {}
    for id_, token in extra.items():
        if not 0 <= id_ <= len(model.texts):
            raise UserError(
                f"{path}: has {len(model.texts)} pieces, so an added token {token.content!r} cannot have id {id_}; {_REMEDY}"
            )
        if not token.special:  # it is found in the text before spaces are marked
            token.content = token.content.replace(MARK, " ")
        kind = Kind.CONTROL if token.special else Kind.USER_DEFINED
        model.put(id_, token.content, kind)
        added[token.content] = token
    tokenizer = sentencepiece_model.tokenizer(model, path)
    tokenizer.add_tokens([added.get(token.content, token) for token in build.added(model.texts, model.kinds)])
    return tokenizer


def _from_tiktoken(path: Path, extra: Added) -> Tokenizer:
    """Llama 3's original form: each token's bytes and rank. Merges are not in it, nor are tokens that are no text."""
    split = _split(path, _TIKTOKEN_SPLITS)
    if not extra:
        raise UserError(
            f"{path}: its special tokens are in tokenizer_config.json (added_tokens_decoder), which is not there; {_REMEDY}"
        )
    vocab = {}
    try:
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            vocab["".join(CHARACTERS[byte] for byte in base64.b64decode(token, validate=True))] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise UserError(f"{path}: line {len(vocab) + 1} is no token and rank ({error}); download it again") from None
    return _byte_level(path, vocab, build.pairs(sorted(vocab, key=vocab.__getitem__), vocab), split, extra)


def _from_vocab(model: Path, extra: Added, special: Set[str], prefix: bool) -> Tokenizer:
    path = model / "merges.txt"
    split = _split(path, _VOCAB_SPLITS)
    vocab = read_json(model / "vocab.json")
    try:
        lines = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 ({error}); download it again") from None
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    named = {vocab[text]: AddedToken(text, normalized=False, special=True) for text in special if text in vocab}
    return _byte_level(path, vocab, merges, split, named | extra, prefix)


def _split(path: Path, known: Mapping[str, str]) -> build.Split:
    name = architecture(read_json(path.with_name("config.json")))
    if name not in known:
        raise UserError(
            f"{path}: how text is split is not in it, and known only for {', '.join(known)}, not for {name}; {_REMEDY}"
        )
    return SPLITS[known[name]]


def _byte_level(
    path: Path, vocab: dict[str, int], merges: Any, split: build.Split, extra: Added, prefix: bool = False
) -> Tokenizer:
    vocab |= {token.content: id_ for id_, token in extra.items()}
    try:
        tokenizer = build.byte_level(vocab, merges, split, prefix)
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"{path}: does not fit the vocabulary ({error}); download it again") from None
    tokenizer.add_tokens(list(extra.values()))
    return tokenizer
