"""The command line as users type it: through the real command where it refuses, up to the launcher where it does not."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launcher.supervise
from tests.unit import vllm
from tpserve import __version__, cli
from tpserve.deployment import Deployment
from tpserve.listen import reserve
from tpserve.settings import Settings

VLLM_LINE = (
    "--tensor-parallel-size", "2", "--dtype", "half", "--max-num-seqs", "256", "--max-model-len", "1000",
    "--gpu-memory-utilization", "0.9", "--trust-remote-code", "--kv-cache-dtype", "auto", "--enforce-eager",
    "--disable-log-requests",
)  # fmt: skip


def tpserve(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tpserve.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | env, check=False)


def refused(*args: str | Path, **env: str) -> str:
    """The one line on stderr of a launch that is refused as it should be."""
    done = tpserve("launch", *args, **env)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("tpserve: error: ")
    return line.removeprefix("tpserve: error: ")


Launch = Callable[..., Deployment]


@pytest.fixture
def launch(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """Runs the command in this process and gives the deployment that the launcher would get."""
    got: list[Deployment] = []

    def supervise(deployment: Deployment, listening: Any, timeline: Any) -> int:
        listening.close()
        got.append(deployment)
        return 0

    monkeypatch.setattr(launcher.supervise, "supervise", supervise)
    for name in [name for name in os.environ if name.startswith("TPSERVE_")]:
        monkeypatch.delenv(name)

    def run(*args: str, model: Path | None = tiny_model) -> Deployment:
        named = [] if model is None else ["--model", str(model)]
        monkeypatch.setattr(sys, "argv", ["tpserve", "launch", *named, "--port", "0", *args])
        status = cli.main()
        assert status == 0, capsys.readouterr().err
        return got.pop()

    return run


def refused_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """As `refused`, without the time of a process."""
    monkeypatch.setattr(sys, "argv", ["tpserve", *args])
    assert cli.main() == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith("tpserve: error: ")
    return line.removeprefix("tpserve: error: ")


def test_refusal_is_one_line_on_stderr_and_status_2(tmp_path: Path) -> None:
    assert refused("--model", tmp_path / "none") == (
        f"--model {tmp_path}/none: no such folder; give a model folder, or a Hub id such as org/name"
    )


def test_taken_port_is_refused_before_anything_starts(tiny_model: Path) -> None:
    with reserve(Settings(port=0)) as taken:
        port = str(taken.getsockname()[1])
        assert refused("--model", tiny_model, "--trust-remote-code", "--port", port).startswith(f"--port {port}: taken")


def test_taken_port_is_refused_before_the_model_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.preflight, "resolve", None)
    with reserve(Settings(port=0)) as taken:
        port = str(taken.getsockname()[1])
        assert "taken" in refused_here(monkeypatch, capsys, "launch", "--model", "org/large", "--port", port)


def test_environment_is_named_in_its_refusal(tiny_model: Path) -> None:
    assert refused("--model", tiny_model, TPSERVE_TP="1.5") == "TPSERVE_TP=1.5: must be a valid integer"


def test_traceback_comes_with_debug_only(tmp_path: Path) -> None:
    done = tpserve("launch", "--debug", "--model", tmp_path)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("tpserve: error: no config.json")


def test_version_is_printed() -> None:
    done = tpserve("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tpserve, version {__version__}\n", "")


def test_launch_checks_without_torch() -> None:
    code = "import sys, tpserve.cli; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--tp 0", "--tp 0: must be greater than or equal to 1"),
        ("--tp -1", "--tp -1: must be greater than or equal to 1"),
        ("-tp 1.5", "--tp 1.5: must be a valid integer"),
        ("--tensor-parallel-size two", "--tp two: must be a valid integer"),
        ("--tp 1000", "sizes that work: 1 to 17"),
        ("--port 99999", "--port 99999: must be less than or equal to 65535"),
        ("--dtype int7", "--dtype int7: must be 'auto', 'bfloat16'"),
        ("--max-num-seq 5", "did you mean --max-num-seqs?"),
        ("--max_num_seq 5", "did you mean --max-num-seqs?"),
        ("--zzz", "no such setting: --zzz; tpserve launch --help lists the settings"),
        ("--quantization awq", "--quantization is not supported yet"),
        ("--speculative_config={'method':'ngram'}", "--speculative-config is not supported yet, only speculative ngram is"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size 2 is not supported yet, only 1"),
        ("--served-model-name", "'--served-model-name' requires an argument"),
        ("--kv-cache-memory lots", "--kv-cache-memory lots: wants bytes"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype fp8 is not supported yet"),
        ("--host 0.0.0.0", "--allow-no-key"),
        ("--corrupt-id soon", "--corrupt-id soon: "),
        ("--scheduling-policy lifo", "--scheduling-policy lifo: must be 'fcfs' or 'priority'"),
        ("--api-key sesam\u00e9", "--api-key ***: wants printable ASCII"),
        ("--api-key-file no/such", "--api-key-file no/such: No such file or directory; give a file of lines KEY NAME"),
        ("--allowed-origins http://a/b", "--allowed-origins http://a/b: wants origins"),
        ("stray", "unexpected argument 'stray': a model is given as --model stray, and a switch"),
        ("--enable-prefix-caching false", "unexpected argument 'false': a model is given as --model false, and a switch"),
        ("--enable-prefix-caching=false", "'--enable-prefix-caching' does not take a value"),
        ("--no-enable-prefix-cach", "did you mean --no-enable-prefix-caching?"),
        ("--config a.yaml --config b.yaml", "--config a.yaml b.yaml: takes one file"),
        ("--config a.yaml b.yaml", "--config a.yaml b.yaml: takes one file"),
        ("--config=none.yaml", "config file none.yaml: No such file or directory"),
        ("--config=", "config file : No such file or directory"),
    ],
)
def test_bad_argument_is_refused_by_name(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: str, named: str
) -> None:
    assert named in refused_here(monkeypatch, capsys, "launch", "--model", str(tiny_model), *args.split())


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "Missing command. The commands are: tpserve launch --model MODEL, tpserve chat"),
        (["lanch"], "launch"),
        (["serve", "demo"], "No such command 'serve'. The commands are: tpserve launch --model MODEL, tpserve chat"),
        (["--model", "demo"], "No such option '--model'. The commands are: tpserve launch --model MODEL, tpserve chat"),
    ],
)
def test_bad_command_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    assert named in refused_here(monkeypatch, capsys, *args)


def test_line_of_a_vllm_user_runs_with_notes(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    found = launch(*VLLM_LINE, "--device", "cpu")
    assert (found.settings.tp, found.dtype, found.max_num_seqs, found.max_model_len) == (2, "float16", 256, 1000)
    out, err = capsys.readouterr()
    assert out == ""
    for note in ("--enforce-eager has no effect", "--gpu-memory-utilization has no effect", "computed in float32", "never run"):
        assert [line.split()[1:3] for line in err.splitlines() if note in line] == [["WARNING", "[launcher]"]], note


def test_defaults_of_vllm_are_taken(launch: Launch, tiny_model: Path) -> None:
    names = {**vllm.LLM, **vllm.SERVE, "tokenizer": str(tiny_model)}.items()
    launch(*itertools.chain.from_iterable(vllm.flags(name, default) for name, default in names if name != "port"))


def test_neutral_values_of_other_engines_bring_no_note(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    launch("-pp", "1", "--data-parallel-size", "1", "--distributed-executor-backend", "mp")
    assert "has no effect" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "field", "expected"),
    [
        ("-tp 3", "tp", 3),
        ("--tensor_parallel_size=3", "tp", 3),
        ("--max_num_seqs 7", "max_num_seqs", 7),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--enable_chunked_prefill", "enable_chunked_prefill", True),
        ("--no_enable_chunked_prefill", "enable_chunked_prefill", False),
        ("--kv-cache-memory-bytes 10MB", "kv_cache_memory", 10_000_000),
        ("--seed 5", "seed", 5),
        ("--speculative ngram", "speculative", "ngram"),
        ("--speculative-algorithm NGRAM", "speculative", "ngram"),
        ("--served-model-name a b --seed 1", "served_model_name", ("a", "b")),
        ("--served_model_name a b --served-model-name c", "served_model_name", ("a", "b", "c")),
        ("--served-model-name=a", "served_model_name", ("a",)),
        ("--scheduling-policy priority", "scheduling_policy", "priority"),
        ('--allowed-origins ["https://a","https://b"]', "allowed_origins", ("https://a", "https://b")),
        ("--allowed-origins https://a https://b", "allowed_origins", ("https://a", "https://b")),
        ("--tool-call-parser hermes --enable-auto-tool-choice", "tool_call_parser", "hermes"),
    ],
)
def test_spelling_reaches_its_setting(launch: Launch, args: str, field: str, expected: Any) -> None:
    assert getattr(launch(*args.split()).settings, field) == expected


@pytest.mark.parametrize(
    ("value", "field", "expected"),
    [
        ("3", "tp", 3),
        ("0", "enable_prefix_caching", False),
        ("a b", "served_model_name", ("a", "b")),
        ("1MiB", "kv_cache_memory", 1024**2),
    ],
)
def test_environment_reaches_its_setting(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, value: str, field: str, expected: Any
) -> None:
    monkeypatch.setenv(f"TPSERVE_{field.upper()}", value)
    assert getattr(launch().settings, field) == expected


def test_flag_wins_over_environment(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPSERVE_TP", "3")
    assert launch("--tp", "2").settings.tp == 2


def test_log_level_hides_notes(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    launch("--enforce-eager", "--log-level", "error")
    assert capsys.readouterr().err == ""


def test_status_of_the_launcher_is_the_commands(launch: Launch, monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    monkeypatch.setattr(launcher.supervise, "supervise", lambda _, listening, __: listening.close() or 7)
    monkeypatch.setattr(sys, "argv", ["tpserve", "launch", "--model", str(tiny_model), "--port", "0"])
    assert cli.main() == 7


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("TPSERVE_MAX_MODEL_LENGTH", "no such setting: TPSERVE_MAX_MODEL_LENGTH; did you mean TPSERVE_MAX_MODEL_LEN?"),
        ("TPSERVE_QQQQ", "no such setting: TPSERVE_QQQQ; tpserve launch --help lists the settings"),
    ],
)
def test_unknown_variable_is_refused_with_the_nearest(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    monkeypatch.setenv(name, "5")
    assert says in refused_here(monkeypatch, capsys, "launch", "--model", str(tiny_model))


def test_other_spelling_of_a_variable_is_read_and_named(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TPSERVE_TENSOR_PARALLEL_SIZE", "none")
    assert "TPSERVE_TENSOR_PARALLEL_SIZE=none: " in refused_here(monkeypatch, capsys, "launch", "--model", str(tiny_model))


def test_two_variables_of_one_setting_are_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TPSERVE_TENSOR_PARALLEL_SIZE", "2")
    monkeypatch.setenv("TPSERVE_TP", "2")
    line = refused_here(monkeypatch, capsys, "launch", "--model", str(tiny_model))
    assert line == "TPSERVE_TENSOR_PARALLEL_SIZE and TPSERVE_TP are the same setting; unset one of them"


def test_empty_variable_sets_nothing(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPSERVE_TP", "")
    monkeypatch.setenv("TPSERVE_CONFIG", "")
    assert launch().settings.tp == 1


@pytest.mark.parametrize(
    ("args", "variable", "expected"),
    [((), "", 2), ((), "3", 3), (("--tp", "1"), "3", 1), (("--tp", "1"), "", 1)],
)
def test_flag_wins_over_environment_over_file(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: tuple[str, ...], variable: str, expected: int
) -> None:
    (tmp_path / "run.yaml").write_text("model:\n  tensor_parallel_size: 2\n  dtype: half\n")
    monkeypatch.setenv("TPSERVE_TENSOR_PARALLEL_SIZE", variable)
    settings = launch("--config", str(tmp_path / "run.yaml"), *args).settings
    assert (settings.tp, settings.dtype) == (expected, "half")


@pytest.mark.parametrize(("args", "expected"), [((), True), (("--no-enable-chunked-prefill",), False)])
def test_switch_of_the_file_can_be_turned_off(launch: Launch, tmp_path: Path, args: tuple[str, ...], expected: bool) -> None:
    (tmp_path / "run.yaml").write_text("enable_chunked_prefill: true")
    assert launch("--config", str(tmp_path / "run.yaml"), *args).settings.enable_chunked_prefill is expected


def test_variable_names_the_config_file_unless_a_flag_does(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text("seed: 1")
    (tmp_path / "b.yaml").write_text("seed: 2")
    monkeypatch.setenv("TPSERVE_CONFIG", str(tmp_path / "a.yaml"))
    assert launch().settings.seed == 1
    assert launch(f"--config={tmp_path / 'b.yaml'}").settings.seed == 2


def test_model_of_the_file_is_relative_to_the_working_directory(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launch: Launch
) -> None:
    (tmp_path / "run.yaml").write_text(f"model:\n  path: {tiny_model.name}\n")
    monkeypatch.chdir(tiny_model.parent)
    monkeypatch.setenv("TPSERVE_CONFIG", str(tmp_path / "run.yaml"))
    assert launch(model=None).model_path == str(tiny_model)


def test_note_of_the_file_is_shown_with_its_line(launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("tp: 1\nenforce-eager: true\n")
    launch("--config", str(tmp_path / "run.yaml"))
    assert "run.yaml:2: enforce-eager has no effect here" in capsys.readouterr().err


def test_wrong_value_of_the_file_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model:\n  tp: two\n")
    assert refused("--config", tmp_path / "run.yaml") == f"{tmp_path}/run.yaml:2: tp: two: must be a valid integer"
    assert refused(TPSERVE_CONFIG=str(tmp_path)) == f"config file {tmp_path}: Is a directory"


def test_shown_config_names_each_source_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model:\n  path: no/such/model\n  tp: 2\n")
    args = ("--config", tmp_path / "run.yaml", "--served-model-name", "a", "b", "--no-enable-prefix-caching", "--show-config")
    done = tpserve("launch", *args, TPSERVE_SEED="5")
    assert (done.returncode, done.stderr) == (0, "")
    lines = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert lines > {
        f"path: no/such/model # {tmp_path}/run.yaml:2",
        f"tp: 2 # {tmp_path}/run.yaml:3",
        "seed: 5 # TPSERVE_SEED",
        "served_model_name: [a, b] # --served-model-name",
        "enable_prefix_caching: false # --no-enable-prefix-caching",
        "port: 8000 # default",
    }


def test_shown_config_is_a_config(
    launch: Launch, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("-tp", "2", "--dtype", "half", "--kv-cache-memory", "10MB", "--served-model-name", "a b", "c", "--seed", "0")
    launched = launch(*args).settings
    monkeypatch.setattr(sys, "argv", ["tpserve", "launch", "--model", str(tiny_model), "--port", "0", *args, "--show-config"])
    assert cli.main() == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    assert launch("--config", str(shown), model=None).settings == launched


def test_keys_are_shown_nowhere(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("server:\n  api_key: [sesame, 'sesam\u00e9']\n")
    done = tpserve("launch", "--api-key", "sesame", "--show-config", TPSERVE_API_KEY="sesame")
    assert "api_key: ['***'] # --api-key" in " ".join(done.stdout.split())
    assert "sesame" not in done.stdout
    assert refused("--config", tmp_path / "run.yaml").startswith(f"{tmp_path}/run.yaml:2: api_key: ***: wants printable")
    assert refused(TPSERVE_API_KEY="sesame s\u00e9same").startswith("TPSERVE_API_KEY=***: wants printable")


def test_children_get_digests_and_no_keys(launch: Launch) -> None:
    found = launch("--api-key", "sesame", "open", "--host", "0.0.0.0")
    assert [key.name for key in found.keys] == ["default", "default"]
    assert "sesame" not in found.model_dump_json()


def test_shown_config_is_checked() -> None:
    assert refused("--show-config", "--tp", "two") == "--tp two: must be a valid integer"


def test_streams_that_the_caller_closed_are_filled() -> None:
    code = """
import os
for fd in (0, 1, 2):
    os.close(fd)
from tpserve import cli
cli._open_standard_streams()
os._exit(sum(os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev for fd in (0, 1, 2)))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3
