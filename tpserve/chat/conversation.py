"""A conversation as data: what was said so far, and how it is kept in a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, str]


@dataclass
class Conversation:
    """What the model is asked: `parameters` are fields of the request's body beside model and messages."""

    model: str
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    turns: list[tuple[str, str]] = field(default_factory=list)  # (question, answer)

    def body(self, *more: Message) -> dict[str, Any]:
        """The body of a request that goes on from here with more messages."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in self.turns:
            messages += [said("user", question), said("assistant", answer)]
        return {"model": self.model, "messages": [*messages, *more], **self.parameters}

    def save(self, name: str) -> None:
        """Write it as the body of a request. Raises OSError, also where there is such a file."""
        with Path(name).expanduser().open("x", encoding="utf-8") as file:
            json.dump(self.body(), file, ensure_ascii=False, indent=2)
            file.write("\n")


def said(role: str, content: str) -> Message:
    """A message."""
    return {"role": role, "content": content}
