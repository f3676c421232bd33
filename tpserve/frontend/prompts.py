"""From what a client sent to the ids of its prompts: the work that is done off the event loop."""

from __future__ import annotations

import secrets

import numpy as np

from tpserve.frontend.chat.template import ChatTemplate, TemplateRefusal
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.schema import GenerateRequest
from tpserve.tokenizer import Tokenizer


class PromptMaker:
    """Renders, tokenizes and checks prompts. Holds no state, so any number of threads may use it at once."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int, max_model_len: int):
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def prompts(self, request: GenerateRequest) -> list[np.ndarray]:
        """The ids of each prompt of a completion, int32, 1 to max_model_len - 1 of them. Raises InvalidRequest."""
        return [
            self.from_text(prompt, "prompt", request.add_special_tokens)
            if isinstance(prompt, str)
            else self._fitting(prompt, "prompt")
            for prompt in request.prompts or ()
        ]

    def render(self, request: GenerateRequest) -> str:
        """The text that the chat template makes of a chat. Raises InvalidRequest."""
        if self._template is None:
            remedy = "give one (--chat-template FILE; chat_template in Python), or use completions"
            raise InvalidRequest(f"messages: the model has no chat template; {remedy}", "messages")
        messages, end = request.messages or (), ""
        if request.template_kwargs.get("continue_final_message"):
            end = secrets.token_hex(16)  # marks where the prompt ends; no client can know it
            messages = (*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + end})
        tools = None if request.tools is None else request.tools.tools
        try:
            text = self._template.render(messages, tools, request.template_kwargs)
        except TemplateRefusal as error:
            raise InvalidRequest(f"messages: the model's chat template refused them: {error}", "messages") from error
        return self._up_to(end, text) if end else text

    def from_text(self, text: str, param: str, add_special_tokens: bool) -> np.ndarray:
        """The text's ids, int32. `param` is the field that the text comes from. Raises InvalidRequest."""
        least = self._tokenizer.least_tokens(text)
        if least >= self._max_model_len:  # tokenizing it would only be work for nothing
            raise self._too_long(f"at least {least}", param)
        return self._fitting(self._tokenizer.encode(text, add_special_tokens), param)

    def _fitting(self, ids: list[int], param: str) -> np.ndarray:
        if not ids:
            raise InvalidRequest(f"{param}: the prompt has no tokens", param)
        if len(ids) >= self._max_model_len:
            raise self._too_long(str(len(ids)), param)
        for id_ in (min(ids), max(ids)):
            if not 0 <= id_ < self._vocab_size:  # be it of a text: a tokenizer may have tokens that the model has not
                raise self._unknown(id_, param)
        return np.array(ids, "<i4")

    def _unknown(self, id_: int, param: str) -> InvalidRequest:
        text = self._tokenizer.text_of(id_)
        named = f" ({text!r})" if text else ""
        most = self._vocab_size - 1
        return InvalidRequest(f"{param}: token id {id_}{named} is not in the model's vocabulary (0 to {most})", param)

    def _too_long(self, count: str, param: str) -> InvalidRequest:
        limit = f"with at least one of answer it must fit into {self._max_model_len}"
        return InvalidRequest(f"{param}: the prompt has {count} tokens; {limit}", param, "context_length_exceeded")

    def _up_to(self, end: str, text: str) -> str:
        before, mark, _ = text.rpartition(end)
        if not mark:
            name = "continue_final_message"
            raise InvalidRequest(f"{name}: the model's chat template does not show the final message's content", name)
        return before
