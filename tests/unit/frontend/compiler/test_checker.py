from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tests.unit.frontend.small import END
from tpserve.frontend.compiler.checker import GrammarChecker
from tpserve.frontend.errors import EngineFault, InvalidRequest, Unavailable
from tpserve.frontend.structured import grammar_of
from tpserve.interpreter import environment

TOO_SLOW = "start: A\nA: " + " & ".join(f"/(?s:.)*{i}(?s:.)*/" for i in range(300))
LIMIT_S = 20.0
T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


@pytest.fixture(scope="module")
def run() -> Iterator[Run[Any]]:
    """The loop of this module's tests."""
    with asyncio.Runner() as runner:
        yield lambda coroutine: runner.run(asyncio.wait_for(coroutine, LIMIT_S))


@pytest.fixture(scope="module")
def made(run: Run[Any], model_folder: Path) -> Iterator[GrammarChecker]:
    made = GrammarChecker(str(model_folder), 310, [END])
    yield made
    run(made.close())
    assert not children()


def children() -> list[psutil.Process]:
    """Ours, that compile."""
    found = psutil.Process().children()
    return [child for child in found if any(name in " ".join(child.cmdline()) for name in ("tpserve: grammars", "compiler"))]


async def refusal(made: GrammarChecker, grammar: str) -> str:
    with pytest.raises(InvalidRequest) as error:
        await made.check(grammar, "guided_grammar")
    assert error.value.param == "guided_grammar"
    return error.value.message


def test_one_child_compiles_all_grammars_each_within_limits(made: GrammarChecker, run: Run[Any]) -> None:
    async def scenario() -> None:
        await made.check('start: "a"', "response_format")
        (child,) = children()
        assert await refusal(made, "start: foo") == 'guided_grammar: unknown name: "foo"'
        assert await refusal(made, "start: A\nA: /a/ & /b/") == "guided_grammar: no text fits it"
        slow, turns = asyncio.create_task(refusal(made, TOO_SLOW)), 0
        while not slow.done():  # the loop goes on
            await asyncio.sleep(0.005)
            turns += 1
        assert await slow == "guided_grammar: takes more than 0.5 s to compile, which is the most"
        assert turns > 10
        await made.check(grammar_of({"response_format": {"type": "json_object"}})[1], "response_format")
        assert children() == [child]
        assert child.nice() > psutil.Process().nice()
        assert child.num_threads() == 1  # so that it can be forked

    run(scenario())


def test_grammar_that_is_known_is_not_compiled_again(made: GrammarChecker, run: Run[Any]) -> None:
    async def scenario() -> None:
        await asyncio.gather(*(made.check('start: "a"', "response_format") for _ in range(50)))  # more than may wait
        await refusal(made, "start: foo")
        (child,) = children()
        child.suspend()
        await made.check('start: "a"', "response_format")
        await refusal(made, "start: foo")
        child.resume()

    run(scenario())


def test_more_grammars_than_may_wait_are_turned_away(made: GrammarChecker, run: Run[Any]) -> None:
    async def scenario() -> None:
        checks = (made.check(f'start: "{i}"', "response_format") for i in range(17))
        *compiled, last = await asyncio.gather(*checks, return_exceptions=True)
        assert not any(compiled)
        assert isinstance(last, Unavailable)
        assert last.message == "16 grammars wait to be compiled, which is the most"
        await made.check('start: "16"', "response_format")

    run(scenario())


def test_grammar_is_compiled_though_its_client_leaves(made: GrammarChecker, run: Run[Any]) -> None:
    async def scenario() -> None:
        leaving = asyncio.create_task(made.check("start: bar", "guided_grammar"))
        await asyncio.sleep(0)
        leaving.cancel()
        assert "unknown name" in await refusal(made, "start: bar")

    run(scenario())


def test_grammar_whose_compilation_is_killed_is_not_to_blame(made: GrammarChecker, run: Run[Any]) -> None:
    unknown = TOO_SLOW.replace("start: A", "start: A A")  # to the checker, whose memory the tests share

    async def scenario() -> None:
        await made.check('start: "a"', "response_format")
        (child,) = children()
        checking = asyncio.create_task(refusal(made, unknown))
        while not (forks := child.children()):
            await asyncio.sleep(0.001)
        forks[0].kill()
        with pytest.raises(EngineFault, match="through no fault of its own"):
            await checking
        assert "0.5 s to compile" in await refusal(made, unknown)

    run(scenario())


def test_child_that_dies_comes_back(made: GrammarChecker, run: Run[Any]) -> None:
    async def scenario() -> None:
        await made.check('start: "a"', "response_format")
        (child,) = children()
        child.suspend()
        checking = asyncio.create_task(made.check('start: "b"', "response_format"))
        await asyncio.sleep(0)
        child.kill()
        with pytest.raises(EngineFault, match="through no fault of its own"):
            await checking
        await made.check('start: "b"', "response_format")
        assert children() != [child]

    run(scenario())


def test_child_that_does_not_answer_is_replaced(made: GrammarChecker, run: Run[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        await made.check('start: "ab"', "response_format")
        (child,) = children()
        child.suspend()
        monkeypatch.setattr("tpserve.frontend.compiler.checker._MOST_S", 0.1)
        with pytest.raises(Unavailable, match="too busy"):
            await made.check('start: "ba"', "response_format")
        monkeypatch.undo()
        await made.check('start: "ba"', "response_format")
        assert children() != [child]

    run(scenario())


def fields(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def nested(depth: int, **schema: Any) -> dict[str, Any]:
    """Objects in objects."""
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(depth: int) -> dict[str, Any]:
    """As many alternatives as two to the power of `depth`."""
    schema: dict[str, Any] = {"type": "string"}
    for i in range(depth):
        choices = [{"type": "object", "properties": {"a": schema, str(i): {}}}, {"type": "array", "items": schema}]
        schema = {"anyOf": choices}
    return schema


REGEXES = [
    "(a|aa)+", "(.*a){12}", "(x+x+)+y", ".*a.{30}", "((a{1,100}){1,100}){1,100}", "((.{0,1000}a){0,1000}b){0,1000}",
    r"(\w{1,50}\s){1,200}", "(" * 9000 + "a" + ")*" * 9000,
]  # fmt: skip
SCHEMAS = [
    nested(28), fields(1500), fields(2200), doubling(9), {"enum": [*range(9000)]}, {"$ref": "#"},
    {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"a": {"$ref": "#/$defs/n"}}}}},
    {"type": "array", "maxItems": 10**6, "minItems": 10**6, "items": {"type": "string", "minLength": 10**6}},
    {"type": "integer", "multipleOf": 99991},
]  # fmt: skip
GRAMMARS = [
    "start: a{1,100000}\na: b{1,100000}\nb: a | s\ns: s s | /x*/",
    "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(30)) + '\nA30: "x"',
]
HOSTILE: list[dict[str, Any]] = [
    *({"regex": regex} for regex in REGEXES),
    *({"json": schema} for schema in SCHEMAS),
    *({"grammar": grammar} for grammar in GRAMMARS),
    {"choice": [str(i) * 12 for i in range(1000)]},
]


@pytest.mark.parametrize("constraint", HOSTILE, ids=lambda constraint: str(constraint)[:40])
def test_hostile_constraint_is_refused_or_compiled_within_limits(
    made: GrammarChecker, run: Run[Any], constraint: dict[str, Any]
) -> None:
    """By the one child, which none of them ends."""

    _, grammar = grammar_of({"structured_outputs": constraint})  # so that it is the child that may refuse it

    async def scenario() -> None:
        await made.check('start: "a"', "response_format")
        before = children()
        with contextlib.suppress(InvalidRequest):
            await made.check(grammar, "structured_outputs")
        assert children() == before

    run(scenario())


def test_child_ends_with_a_frontend_that_is_killed(model_folder: Path) -> None:
    script = (
        "import asyncio\n"
        "from tpserve.frontend.compiler.checker import GrammarChecker\n"
        "async def main():\n"
        f"    made = GrammarChecker({str(model_folder)!r}, 310, [{END}])\n"
        "    await made.check('start: \"a\"', 'x')\n"
        "    print(made._child.pid, flush=True)\n"
        f"    await made.check({TOO_SLOW!r}, 'x')\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment()) as frontend:
        assert frontend.stdout is not None
        child = psutil.Process(int(frontend.stdout.readline()))
        limit = time.monotonic() + LIMIT_S
        while not (forks := child.children()):
            assert time.monotonic() < limit
        os.kill(frontend.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([child, *forks], LIMIT_S)
    assert not alive or all(process.status() == psutil.STATUS_ZOMBIE for process in alive)
