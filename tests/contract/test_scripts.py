"""scripts/setup in a scratch checkout whose .venv is a stub, so that nothing is installed; what the scripts refuse; what the
load client of scripts/bench makes of a stream.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
# Answers the calls of scripts/setup: notes the arguments of pip and prints the CUDA version of the torch that "is installed".
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-m pip") [ "$3" = --version ] || echo "$@" >>"$STUB_LOG" ;;
  "- ") echo "$STUB_TORCH_CUDA" ;;
  "--version ") echo "Python 3.11.7" ;;
esac
"""


class Checkout:
    """A copy of what scripts/setup reads, in a folder of its own."""

    def __init__(self, root: Path):
        self.root = root
        self.log = root / "pip.log"
        for name in ("scripts/setup", "configs/constraints.txt", "pyproject.toml"):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        self.put(".venv/bin/python", PYTHON)
        self.path = f"{root}/bin:{os.environ['PATH']}"

    def put(self, name: str, script: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script)
        file.chmod(0o755)

    def setup(self, *options: str, torch_cuda: str = "13.0") -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        environment = {**os.environ, "PATH": self.path, "STUB_LOG": str(self.log), "STUB_TORCH_CUDA": torch_cuda}
        command = ["bash", str(self.root / "scripts/setup"), *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)

    @property
    def pip_calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def driver(checkout: Checkout) -> Checkout:
    """A machine with an NVIDIA driver."""
    checkout.put("bin/nvidia-smi", "#!/bin/sh\nexit 0\n")
    return checkout


def test_setup_installs_once_with_the_pins(checkout: Checkout) -> None:
    assert checkout.setup().returncode == 0
    assert all("--constraint configs/constraints.txt" in call for call in checkout.pip_calls)
    assert checkout.pip_calls[-1].endswith("--editable .[dev]")
    again = checkout.setup()
    assert (again.returncode, again.stdout, again.stderr, checkout.pip_calls) == (0, "", "", [])


def test_setup_installs_again_when_a_pin_changes(checkout: Checkout) -> None:
    checkout.setup()
    with (checkout.root / "configs/constraints.txt").open("a") as file:
        file.write("new==1\n")
    checkout.setup()
    assert checkout.pip_calls


def test_setup_with_a_torch_index_takes_only_torch_from_it_and_remembers_it(checkout: Checkout) -> None:
    assert checkout.setup("--torch-index", "file:///index").returncode == 0
    first, *rest = checkout.pip_calls
    assert "--no-deps --force-reinstall --index-url file:///index torch==" in first
    assert not [call for call in rest if "file:///index" in call]
    checkout.setup()
    assert checkout.pip_calls == []


def test_setup_with_cuda_builds_flash_attn_against_the_installed_torch(checkout: Checkout) -> None:
    checkout.setup()
    assert checkout.setup("--cuda").returncode == 0
    assert checkout.pip_calls[-1].endswith("--no-build-isolation --editable .[dev,cuda]")


def test_setup_with_cuda_and_a_cpu_torch_exits_2_with_the_remedy(checkout: Checkout) -> None:
    result = checkout.setup("--cuda", torch_cuda="")
    assert result.returncode == 2
    assert "--torch-index" in result.stderr.splitlines()[-1]


def test_setup_on_a_machine_with_a_driver_and_a_cpu_torch_exits_2_with_the_remedy(driver: Checkout) -> None:
    for _ in range(2):  # also when nothing is left to install
        result = driver.setup(torch_cuda="")
        assert result.returncode == 2
        line = result.stderr.splitlines()[-1]
        assert "NVIDIA driver" in line
        assert "--torch-index" in line
        assert "--device cpu" in line
        driver.setup(torch_cuda="13.0")


def test_setup_on_a_machine_with_a_driver_when_told_cpu_once_goes_on(driver: Checkout) -> None:
    assert driver.setup("--device", "cpu", torch_cuda="").returncode == 0
    assert driver.setup(torch_cuda="").returncode == 0
    assert driver.setup("--device", "auto", torch_cuda="").returncode == 2


@pytest.mark.parametrize("script", ["setup", "quickstart", "test"])
def test_script_with_an_unknown_option_exits_2_with_one_line(script: str) -> None:
    result = subprocess.run([ROOT / "scripts" / script, "--bogus"], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2
    assert result.stderr == f"{script}: unknown option --bogus; scripts/{script} --help lists them\n"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--device"], "setup: --device wants a value"),
        (["--torch-index"], "setup: --torch-index wants a value"),
        (["--device", "tpu"], "setup: --device is auto, cpu or cuda, not tpu"),
    ],
)
def test_setup_with_a_bad_value_exits_2_with_one_line(checkout: Checkout, options: list[str], line: str) -> None:
    result = checkout.setup(*options)
    assert (result.returncode, result.stderr.splitlines()) == (2, [line])


def test_setup_with_an_old_python_exits_2_and_names_it(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(checkout.root / ".venv")
    checkout.put("bin/python-old", '#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.10.9" || exit 1\n')
    monkeypatch.setenv("PYTHON", "python-old")
    result = checkout.setup()
    assert result.returncode == 2
    assert "Python 3.11 or newer is needed, python-old is Python 3.10.9" in result.stderr


# As servers stream: an event is a chunk; llama.cpp closes with an event that has a reason and no token.
EVENTS = [
    {"choices": [{"text": "a", "finish_reason": None}]},
    {"choices": [{"text": "", "finish_reason": None}]},  # of half a character
    {"choices": [{"text": "\u00bd", "finish_reason": None}]},
    {"choices": [{"text": "", "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}},
]


def http(events: list[dict[str, object]], last: bytes = b"data: [DONE]\n\n") -> bytes:
    """A streamed answer, in chunks."""
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [last]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(line), line) for line in lines)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@pytest.fixture(scope="module")
def client() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts/bench"))
        yield importlib.import_module("client")


@given(cuts=st.sets(st.integers(1, len(http(EVENTS)) - 1)))
def test_load_client_stamps_each_event_with_the_piece_that_ends_it(client: ModuleType, cuts: set[int]) -> None:
    raw = http(EVENTS)
    edges = [0, *sorted(cuts), len(raw)]
    answer = client.read(0.0, [(float(end), raw[start:end]) for start, end in itertools.pairwise(edges)])
    ends = [raw.index(json.dumps(event).encode()) + len(json.dumps(event)) + 1 for event in EVENTS[:3]]
    assert answer.events == [min(edge for edge in edges if edge >= end) for end in ends]
    assert (answer.prompt_tokens, answer.tokens) == (5, 3)


@pytest.mark.parametrize("raw", [http(EVENTS, last=b""), b"HTTP/1.1 500 Oops\r\n\r\n", b""])
def test_load_client_with_an_answer_that_is_not_whole_stops_the_benchmark(client: ModuleType, raw: bytes) -> None:
    with pytest.raises(SystemExit, match="not a whole stream"):
        client.read(0.0, [(1.0, raw)])


def test_load_client_figures_of_known_answers_are_their_medians(client: ModuleType) -> None:
    def answer(first: float, gap: float) -> object:
        return client.Answer(4, 3, 10.0, [10 + first, 10 + first + gap, 10 + first + 2 * gap])

    found = client.figures([answer(0.5, 0.25), answer(1.0, 0.125), answer(2.0, 0.0625)], seconds=4.5)
    assert (found.tok_s, found.ttft_ms, found.tpot_ms) == (2.0, 1000.0, 125.0)
    assert (found.itl_p50_ms, found.itl_p99_ms) == (125.0, 250.0)
