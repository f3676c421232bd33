"""How an LLM begins and ends in a program: exits, signals, kills, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server import START_LIMIT_S, alive, wait_for
from tpserve import LLM, EngineDead, SamplingParams, UserError

ROOT = Path(__file__).parents[2]
LONG = SamplingParams(max_tokens=900, ignore_eos=True, temperature=0)
BEGIN = """
import os, sys, threading, time
from tpserve import LLM, EngineDead, SamplingParams
LONG = SamplingParams(max_tokens=900, ignore_eos=True, temperature=0)
print("starting", flush=True)
llm = LLM({model!r}, tensor_parallel_size=2, dtype="float32", kv_cache_memory="64MiB")
print("up", flush=True)
"""
FOREVER = "while True: llm.generate(['Once upon a time'] * 4, LONG)\n"


class Program:
    """A Python program from stdin, in a process group of its own; what it prints, a line at a time."""

    def __init__(self, source: str, redirect: str = ""):
        command = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-X", "dev", "-"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.process = subprocess.Popen(
            command, cwd="/", env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, start_new_session=True, **pipes
        )
        assert self.process.stdin is not None
        self.process.stdin.write(source)
        self.process.stdin.close()
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=source_and_lines, daemon=True)
            for source_and_lines in ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        with stream:
            lines.extend(line.rstrip("\n") for line in iter(stream.readline, ""))

    def until(self, line: str) -> None:
        """Wait until it has printed this line."""
        wait_for(lambda: line in self.lines or self.process.poll() is not None, START_LIMIT_S, line)
        assert line in self.lines, "\n".join(self.errors)

    def processes(self) -> dict[str, int]:
        """Process ids of the engine by title."""
        titles = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                titles[" ".join(process.cmdline()).strip().removeprefix("tpserve: ")] = process.pid
        return titles

    def interrupt(self) -> None:
        """Ctrl-C: to the whole group, as a terminal sends it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ends(self) -> int:
        """Its exit status, once all it printed is here."""
        status = self.process.wait(START_LIMIT_S)
        for reader in self._readers:
            reader.join(5)
        return status


@pytest.fixture
def run(tiny_model: Path, runtime: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs that begin with an LLM. At the end nothing of them is left within 5 s."""
    programs: list[Program] = []

    def start(source: str, **options: str) -> Program:
        programs.append(Program(BEGIN.format(model=str(tiny_model)) + source, **options))
        return programs[-1]

    yield start
    for program in programs:
        if program.process.poll() is None:
            program.process.kill()
            program.process.wait()


def assert_clean(runtime: Path, pids: Any) -> None:
    """Within 5 s no process and no new file is left."""
    wait_for(lambda: not alive([*pids]), 5, "end of all processes")
    wait_for(lambda: not list(runtime.iterdir()), 5, "removal of the run directory")


def test_program_without_main_guard_that_ends_leaves_nothing(run: Callable[..., Program], runtime: Path) -> None:
    program = run("print(len(llm.generate('abc')), 'torch' in sys.modules, flush=True)\nprint('end', flush=True)\n")
    program.until("up")
    pids = program.processes()
    assert set(pids) == {"launcher", "coordinator", "worker 0/2", "worker 1/2"}
    assert program.ends() == 0
    assert program.lines == ["starting", "up", "1 False", "end"]
    assert program.errors == []
    assert_clean(runtime, pids.values())


@pytest.mark.slow
def test_uncaught_exception_leaves_nothing(run: Callable[..., Program], runtime: Path) -> None:
    program = run("raise ValueError('of the user')\n")
    assert program.ends() == 1
    assert program.errors[-1] == "ValueError: of the user"
    assert len(program.errors) == 3
    assert_clean(runtime, [])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_program_leaves_nothing(run: Callable[..., Program], runtime: Path, number: int) -> None:
    program = run(FOREVER)
    program.until("up")
    pids = program.processes()
    program.process.send_signal(number)
    assert program.ends() == -number
    assert_clean(runtime, pids.values())


@pytest.mark.slow
def test_program_killed_while_its_engine_starts_leaves_nothing(run: Callable[..., Program], runtime: Path) -> None:
    program = run(FOREVER)
    wait_for(lambda: "worker 1/2" in program.processes(), START_LIMIT_S, "workers")
    pids = program.processes()
    program.process.kill()
    program.ends()
    assert_clean(runtime, pids.values())


@pytest.mark.slow
@pytest.mark.parametrize("last", ["launcher", "worker 1/2"])
def test_ctrl_c_while_the_engine_starts_leaves_nothing(run: Callable[..., Program], runtime: Path, last: str) -> None:
    program = run(FOREVER)
    wait_for(lambda: last in program.processes(), START_LIMIT_S, last)
    pids = program.processes()
    program.interrupt()
    assert program.ends() == -signal.SIGINT
    assert program.errors[-1] == "KeyboardInterrupt"
    assert not [line for line in program.errors if "ERROR" in line]
    assert_clean(runtime, pids.values())


def test_ctrl_c_cuts_the_call_and_the_llm_goes_on(run: Callable[..., Program], runtime: Path) -> None:
    program = run(
        "for _ in range(2):\n"
        "    try:\n"
        "        print('busy', _, flush=True)\n"
        "        while True: llm.generate(['Once upon a time'] * 4, LONG)\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', flush=True)\n"
        "engine = llm._host._engine\n"
        "limit = time.monotonic() + 20\n"
        "while not engine.is_idle and time.monotonic() < limit: time.sleep(0.01)\n"
        "print(engine.is_idle, len(llm.generate('abc', SamplingParams(max_tokens=3))), flush=True)\n"
        "llm.close()\n"
        "print('closed', flush=True)\n"
        "try: llm.generate('abc')\n"
        "except EngineDead as error: print(error, flush=True)\n"
        "time.sleep(60)\n"
    )
    program.until("busy 0")
    program.interrupt()
    program.until("busy 1")
    pids = program.processes()
    assert set(pids) == {"launcher", "coordinator", "worker 0/2", "worker 1/2"}
    program.interrupt()
    program.until("this LLM is closed")
    assert program.lines[-3:] == ["True 1", "closed", "this LLM is closed"]
    assert program.lines.count("interrupted") == 2
    assert not alive([*pids.values()])
    assert not list(runtime.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "cause"),
    [
        ("launcher", "the launcher died"),
        ("coordinator", "coordinator died"),
        ("worker 0/2", r"worker 0/2 died at step \d+"),
        ("worker 1/2", r"worker 1/2 died at step \d+"),
    ],
)
def test_killed_process_is_the_exception_of_all_calls_and_later_ones(
    run: Callable[..., Program], runtime: Path, victim: str, cause: str
) -> None:
    program = run(
        "def ask():\n"
        "    try:\n"
        "        while True: llm.generate(['Once upon a time'] * 3, LONG)\n"
        "    except EngineDead as error:\n"
        "        os.write(1, f'dead: {error}\\n'.encode())\n"  # whole lines, from any thread
        "threads = [threading.Thread(target=ask) for _ in range(2)]\n"
        "for thread in threads: thread.start()\n"
        "while llm._host._engine._stats.running < 6: time.sleep(0.01)\n"
        "print('busy', flush=True)\n"
        "for thread in threads: thread.join()\n"
        "ask()\n"
    )
    program.until("busy")
    pids = program.processes()
    os.kill(pids[victim], signal.SIGKILL)
    assert program.ends() == 0
    said = [line for line in program.lines if line.startswith("dead:")]
    assert len(said) == 3
    assert all(re.fullmatch(rf"dead: {cause}: killed by signal 9 \(SIGKILL\)", line) for line in said)
    assert_clean(runtime, pids.values())


@pytest.mark.slow
def test_closed_standard_streams_harm_nothing(run: Callable[..., Program], runtime: Path, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    source = (
        "params = SamplingParams(max_tokens=16, ignore_eos=True)\n"
        f"open({str(answer)!r}, 'w').write(str(len(llm.generate('abc', params)[0].outputs[0].token_ids)))\n"
    )
    program = run(source, redirect="1>&- 2>&-")
    assert program.ends() == 0
    assert answer.read_text() == "16"
    assert_clean(runtime, [])


def children() -> dict[str, int]:
    """The engine processes of this process, by title."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline()).strip()
            if title.startswith("tpserve: "):
                found[f"{title} {process.pid}"] = process.pid
    return found


@pytest.mark.slow
def test_two_llms_at_once_and_garbage_collection(tiny_model: Path, runtime: Path) -> None:
    before = children()
    first = LLM(tiny_model, dtype="float32", kv_cache_memory="64MiB", seed=7)
    with ThreadPoolExecutor(1) as other_thread:  # one that ends before the LLM it made
        second = other_thread.submit(LLM, tiny_model, dtype="float32", kv_cache_memory="64MiB", seed=7).result()
    mine = {title: pid for title, pid in children().items() if title not in before}
    assert len(mine) == 6
    drawn = [[output.outputs[0].text for output in llm.generate(["abc"] * 3)] for llm in (first, second)]
    assert drawn[0] == drawn[1], "the seed of an LLM makes its answers reproducible"
    assert len(set(drawn[0])) == 3
    del first
    wait_for(lambda: len(alive([*mine.values()])) == 3, 5, "end of the first")
    assert second.generate("abc")
    second.close()
    second.close()
    assert_clean(runtime, mine.values())


@pytest.mark.slow
def test_killed_launcher_leaves_nothing_while_the_program_goes_on(tiny_model: Path, runtime: Path) -> None:
    before = children()
    llm = LLM(tiny_model, tensor_parallel_size=2, dtype="float32", kv_cache_memory="64MiB")
    mine = {title: pid for title, pid in children().items() if title not in before}
    os.kill(next(pid for title, pid in mine.items() if "launcher" in title), signal.SIGKILL)
    assert_clean(runtime, mine.values())
    with pytest.raises(EngineDead, match=r"the launcher died: killed by signal 9 \(SIGKILL\)"):
        llm.generate("abc", LONG)


def test_mistake_is_found_before_a_process_starts(tiny_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    for keywords, message in (
        (dict(model="/no/such/folder"), "/no/such/folder"),
        (dict(model=tiny_model, tensor_parallel_size=999), "999"),
        (dict(model=tiny_model, max_model_len=10**6), "1000000"),
    ):
        with pytest.raises(UserError, match=message):
            LLM(**keywords)  # type: ignore[arg-type]


@pytest.mark.slow
def test_worker_that_cannot_start_is_the_exception(
    tiny_model: Path, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('this torch is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = children()
    with pytest.raises(EngineDead, match=r"worker 0/1 could not start: RuntimeError: this torch is broken"):
        LLM(tiny_model, dtype="float32")
    assert_clean(runtime, [pid for title, pid in children().items() if title not in before])


@pytest.mark.slow
def test_call_as_vllm_users_have_it_runs_with_the_demo_model(demo_model: Path) -> None:
    llm = LLM(model="demo", tensor_parallel_size=2)
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))
    assert output.outputs[0].text.startswith(" Paris")
    llm.close()
