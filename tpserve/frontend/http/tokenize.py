"""Text to ids and back: what /tokenize and /detokenize answer, as vLLM has it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tpserve.frontend import neutral, schema
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.prompts import PromptMaker
from tpserve.tokenizer import Tokenizer

MAX_CHARS = 2**20
MAX_IDS = 2**20
# Of a chat, what the ids of its prompt depend on.
_CHAT = (
    "messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents", "add_generation_prompt",
    "continue_final_message", "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip
_LLAMA_CPP: neutral.Table = {"parse_special": (True,), "with_pieces": (False,)}

_Text = Annotated[str, Field(max_length=MAX_CHARS)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None


class TokenizeBody(_Body):
    """Body of POST /tokenize: a prompt, or the messages of a chat with what else makes its prompt."""

    prompt: _Text | None = None
    content: _Text | None = Field(None, description="llama.cpp's name for the prompt.")
    messages: list[Any] | None = None
    add_special_tokens: bool | None = Field(None, description="Such as BOS. By default to prompts, not to chats.")
    add_special: bool | None = Field(None, description="llama.cpp's name for it.")
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """Body of POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_IDS)]


class TextMaker:
    """Answers both. Holds no state, so any number of threads may use it at once."""

    def __init__(self, tokenizer: Tokenizer, prompts: PromptMaker, vocab_size: int, max_model_len: int):
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def tokenize(self, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """(The ids and how many there are, the fields that nobody knows). Raises InvalidRequest."""
        body = schema.validated(TokenizeBody, fields)
        of_chat = {name: value for name, value in (body.model_extra or {}).items() if name in _CHAT}
        others = {name: value for name, value in (body.model_extra or {}).items() if name not in _CHAT}
        unknown = neutral.check(others, _LLAMA_CPP)
        ids = self._ids_of_text(body) if body.messages is None else self._ids_of_chat(body, of_chat)
        strings = [self._tokenizer.token(id_) for id_ in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids, "token_strs": strings}, unknown

    def detokenize(self, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """(The text of the ids, special tokens included; the fields that nobody knows). Raises InvalidRequest."""
        body = schema.validated(DetokenizeBody, fields)
        beyond = max(body.tokens, default=0)
        if beyond >= self._vocab_size:
            most = self._vocab_size - 1
            raise InvalidRequest(f"tokens: token id {beyond} is not in the model's vocabulary (0 to {most})", "tokens")
        return {"prompt": self._tokenizer.decode(body.tokens)}, [*(body.model_extra or {})]

    def _ids_of_text(self, body: TokenizeBody) -> list[int]:
        given = {text for text in (body.prompt, body.content) if text is not None}
        if len(given) != 1:
            raise InvalidRequest("prompt: wants one of prompt (or content, the same) and messages", "prompt")
        by_default = body.prompt is not None or bool(body.add_special)
        return self._tokenizer.encode(given.pop(), by_default if body.add_special_tokens is None else body.add_special_tokens)

    def _ids_of_chat(self, body: TokenizeBody, fields: dict[str, Any]) -> list[int]:
        if body.prompt is not None or body.content is not None:
            raise InvalidRequest("messages: wants one of prompt and messages", "messages")
        given = {"messages": body.messages, "add_special_tokens": body.add_special_tokens, **fields}
        (ids,) = self._prompts.prompts(schema.chat_request(given, None, self._vocab_size))
        return [int(id_) for id_ in ids]
