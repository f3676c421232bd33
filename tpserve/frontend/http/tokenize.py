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
    add_special: bool | None = Field(None, description="llama.cpp's name for it, by default not to its content.")
    return_token_strs: bool | None = None

    @property
    def adds_special_tokens(self) -> bool | None:
        """What both names for it say. Raises InvalidRequest if they differ."""
        given = {value for value in (self.add_special_tokens, self.add_special) if value is not None}
        if len(given) > 1:
            raise InvalidRequest("add_special_tokens and add_special differ: give one of them", "add_special_tokens")
        return given.pop() if given else None


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
        if body.messages is not None:
            ids, ignored = self._ids_of_chat(body, of_chat)
        else:
            ids, ignored = self._ids_of_text(body, of_chat), []
        strings = [self._tokenizer.token(id_) for id_ in ids] if body.return_token_strs else None
        made = {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids, "token_strs": strings}
        return made, unknown + ignored

    def detokenize(self, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """(The text of the ids, special tokens included; the fields that nobody knows). Raises InvalidRequest."""
        body = schema.validated(DetokenizeBody, fields)
        beyond = max(body.tokens, default=0)
        if beyond >= self._vocab_size:
            most = self._vocab_size - 1
            raise InvalidRequest(f"tokens: token id {beyond} is not in the model's vocabulary (0 to {most})", "tokens")
        return {"prompt": self._tokenizer.decode(body.tokens)}, [*(body.model_extra or {})]

    def _ids_of_text(self, body: TokenizeBody, of_chat: dict[str, Any]) -> list[int]:
        for name, value in of_chat.items():
            if value is not None:
                raise InvalidRequest(f"{name}: only with messages", name)
        given = {text for text in (body.prompt, body.content) if text is not None}
        if len(given) != 1:
            raise InvalidRequest("prompt: wants one of prompt (or content, the same) and messages", "prompt")
        asked = body.adds_special_tokens
        return self._tokenizer.encode(given.pop(), body.prompt is not None if asked is None else asked)

    def _ids_of_chat(self, body: TokenizeBody, of_chat: dict[str, Any]) -> tuple[list[int], list[str]]:
        """The ids, and the fields within those of a chat that nobody knows."""
        if body.prompt is not None or body.content is not None:
            raise InvalidRequest("messages: wants one of prompt and messages", "messages")
        given = {"messages": body.messages, "add_special_tokens": body.adds_special_tokens, **of_chat}
        request = schema.chat_request(given, None, self._vocab_size)
        ids = self._prompts.from_text(self._prompts.render(request), "messages", request.add_special_tokens)
        return ids.tolist(), [*request.ignored]
