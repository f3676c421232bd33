"""What users of langchain-openai do: python langchain_client.py URL"""

from __future__ import annotations

import sys
from typing import Literal

import openai
from checks import run
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
URL = f"{sys.argv[1]}/v1"
KEY = SecretStr("none")
MODEL = ChatOpenAI(model="demo", base_url=URL, api_key=KEY, temperature=0, max_completion_tokens=120, max_retries=0)


class Fruit(BaseModel):
    """A fruit."""

    name: Literal["apple", "plum"]
    count: Literal[1, 2, 3]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"Sun in {city}."


def invoke() -> None:
    """A whole answer."""
    answer = MODEL.invoke(QUESTION)
    assert answer.content == ANSWER, answer
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def stream() -> str:
    """Its pieces."""
    pieces = list(
        MODEL.stream(
            [SystemMessage("You are a helpful AI assistant named SmolLM, trained by Hugging Face"), HumanMessage(QUESTION)]
        )
    )
    assert "".join(str(piece.content) for piece in pieces) == ANSWER, pieces
    return f"{len(pieces)} pieces"


def batch() -> None:
    """Several at once."""
    assert [answer.content for answer in MODEL.batch([QUESTION] * 4)] == [ANSWER] * 4


def completion() -> None:
    """The other endpoint."""
    model = OpenAI(model="demo", base_url=URL, api_key=KEY, temperature=0, max_tokens=6, max_retries=0)
    assert model.invoke("1, 2, 3, 4, 5,") == " 6, 7,"


def with_structured_output() -> None:
    """By schema, by a tool, and in JSON mode."""
    for method in ("json_schema", "function_calling"):
        fruit = MODEL.with_structured_output(Fruit, method=method, strict=True).invoke("Name a fruit.")
        assert isinstance(fruit, Fruit), (method, fruit)
    raw = MODEL.with_structured_output(None, method="json_mode", include_raw=True).invoke("Answer in JSON: name a fruit.")
    assert raw["raw"].content.lstrip().startswith("{"), raw


def bind_tools() -> None:
    """A call, its result, and an answer; the call streamed, too."""
    known = tool(weather)
    model = MODEL.bind_tools([known], tool_choice="required", parallel_tool_calls=False, strict=True)
    called = model.invoke("What is the weather in Paris?")
    assert isinstance(called, AIMessage)
    call = called.tool_calls[0]
    assert call["name"] == "weather", called
    assert call["args"]["city"] in ("Paris", "Rome"), called
    pieces = list(model.stream("What is the weather in Paris?"))
    whole = sum(pieces[1:], start=pieces[0])
    assert whole.tool_calls[0]["args"] == call["args"], whole
    result = ToolMessage(known.invoke(call["args"]), tool_call_id=str(call["id"]))
    assert MODEL.bind_tools([known]).invoke(["What is the weather in Paris?", called, result])


def logprobs() -> None:
    """Of an answer's tokens."""
    answer = MODEL.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert all(entry["logprob"] <= 0 for entry in answer.response_metadata["logprobs"]["content"])


def errors() -> None:
    """As the client's exceptions."""
    named = None
    try:
        MODEL.bind(temperature=-1).invoke(QUESTION)
    except openai.BadRequestError as error:
        named = error.param
    assert named == "temperature", named


if __name__ == "__main__":
    sys.exit(run([invoke, stream, batch, completion, with_structured_output, bind_tools, logprobs, errors]))
