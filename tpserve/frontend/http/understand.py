"""From a body's bytes to what is asked of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpserve.frontend import neutral, schema
from tpserve.frontend.body import ChatBody, CompletionBody
from tpserve.frontend.chat.answer.message import MessageParser, PlainMessage
from tpserve.frontend.errors import InvalidRequest, UnknownModel, shown
from tpserve.frontend.http import json_body
from tpserve.frontend.http.service import Service
from tpserve.frontend.http.tokenize import TokenizeBody
from tpserve.frontend.text.echo import Echo, echoes
from tpserve.sampling import SamplingDefaults

ToRequest = Callable[[dict[str, Any], int | None, int, SamplingDefaults], schema.GenerateRequest]

_KNOWN = {*CompletionBody.model_fields, *ChatBody.model_fields, *neutral.COMPLETION, *neutral.CHAT, *TokenizeBody.model_fields}


@dataclass(frozen=True)
class Understood:
    """What a body asks for: the name to answer under, the request, the ids of its prompts, their echoes if wanted, and what
    takes the text of each answer apart.
    """

    model: str
    request: schema.GenerateRequest
    prompts: list[np.ndarray]
    echoes: list[Echo]
    new_parser: Callable[[], MessageParser]


def understand(service: Service, body: bytes, to_request: ToRequest) -> Understood:
    """Work that is done off the event loop. Raises ApiError."""
    deployment = service.deployment
    fields = json_body.parse(body)
    model = model_name(fields.get("model"), deployment.served_names)  # before all else: it may be another server's request
    wanted = to_request(fields, deployment.settings.seed, deployment.spec.vocab_size, deployment.sampling)
    if wanted.priority and deployment.settings.scheduling_policy == "fcfs":
        raise InvalidRequest("priority: only where the server has --scheduling-policy priority", "priority")
    check_ignored(wanted.ignored, deployment.settings.strict)
    wanted, prompts, new_parser = _with_prompts(service, wanted)
    wanted.check(prompts, deployment.max_model_len)
    return Understood(model, wanted, prompts, echoes(wanted, prompts, service.engine.tokenizer), new_parser)


def _with_prompts(
    service: Service, wanted: schema.GenerateRequest
) -> tuple[schema.GenerateRequest, list[np.ndarray], Callable[[], MessageParser]]:
    """The request with what the form of messages adds to a chat, the ids of its prompts, and what reads its answers."""
    if wanted.messages is None:
        return wanted, service.prompts.prompts(wanted), PlainMessage
    wanted, text, new_parser = service.format.prepare(wanted, service.prompts.render)
    return wanted, [service.prompts.from_text(text, "messages", wanted.add_special_tokens)], new_parser


def check_ignored(ignored: Sequence[str], is_strict: bool) -> None:
    """Refuse fields that nobody knows, if they are to be refused."""
    if ignored and is_strict:
        raise neutral.refuse(ignored[0], _KNOWN)


def model_name(asked: object, served_names: tuple[str, ...]) -> str:
    """The name to answer under; the first when none is asked for. Raises UnknownModel, InvalidRequest."""
    if asked is None:
        return served_names[0]
    if not isinstance(asked, str):
        raise InvalidRequest("model: must be a string", "model")
    if asked in served_names:
        return asked
    served = ", ".join(served_names)
    raise UnknownModel(f"the model {shown(asked)!r} is not served here; served: {served}", "model", "model_not_found")
