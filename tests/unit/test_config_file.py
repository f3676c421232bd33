"""The config file: what it may say, what is refused with which line, and that what is shown can be read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example
from hypothesis import given as generated
from hypothesis import settings as at_most
from hypothesis import strategies as st

from tpserve import config_file, sources, spellings
from tpserve.settings import Settings, UserError
from tpserve.sources import Given

READER = """\
scheduler:
  policy: "fcfs"
  max_num_seqs: 256
  max_num_batched_tokens: 4096
  enable_chunked_prefill: false
model:
  dtype: "float16"
  tensor_parallel_size: 1
  gpu_memory_utilization: 0.9
"""

Read = Callable[[str | bytes], Settings]
Refusal = Callable[[str | bytes], str]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """The settings of a file with this content."""
    monkeypatch.chdir(tmp_path)

    def run(content: str | bytes) -> Settings:
        Path("run.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
        return sources.check(config_file.read("run.yaml")[0])

    return run


@pytest.fixture
def refusal(read: Read) -> Refusal:
    """The line that such a file is refused with."""

    def run(content: str | bytes) -> str:
        with pytest.raises(UserError) as error:
            read(content)
        return str(error.value)

    return run


def test_settings_in_sections_are_read_with_their_lines(read: Read) -> None:
    assert read(READER) == Settings(
        max_num_batched_tokens=4096, enable_chunked_prefill=False, dtype="float16", gpu_memory_utilization=0.9
    )
    given, notes = config_file.read("run.yaml")
    assert {field: one.source for field, one in given.items()} == {
        "scheduling_policy": "run.yaml:2",
        "max_num_seqs": "run.yaml:3",
        "max_num_batched_tokens": "run.yaml:4",
        "enable_chunked_prefill": "run.yaml:5",
        "dtype": "run.yaml:7",
        "tp": "run.yaml:8",
        "gpu_memory_utilization": "run.yaml:9",
    }
    assert notes == []


@pytest.mark.parametrize(
    ("content", "field", "expected"),
    [
        ("model: {path: some/folder}", "model", "some/folder"),
        ("model: {model: some/folder}", "model", "some/folder"),
        ("model: some/folder", "model", "some/folder"),
        ("model:\n  tp: 3", "tp", 3),
        ("model: {tensor-parallel-size: 3}", "tp", 3),
        ("tensor-parallel-size: 3", "tp", 3),
        ("max_num_seqs: 7", "max_num_seqs", 7),
        ('max_num_seqs: "7"', "max_num_seqs", 7),
        ("max_num_seqs: 010", "max_num_seqs", 10),
        ("max_model_len: auto", "max_model_len", "auto"),
        ("kv-cache-memory: 2GiB", "kv_cache_memory", 2 * 1024**3),
        ("cache: {enable_prefix_caching: off}", "enable_prefix_caching", False),
        ("enable_prefix_caching: no", "enable_prefix_caching", False),
        ("debug: yes", "debug", True),
        ("model: no", "model", "no"),
        ("model: 2024-01-01", "model", "2024-01-01"),
        ("model: 0x1f", "model", "0x1f"),
        ("served_model_name: 1.10", "served_model_name", ("1.10",)),
        ("served_model_name: my model", "served_model_name", ("my model",)),
        ("served_model_name: [a, b]", "served_model_name", ("a", "b")),
        ("server:\n  served-model-name:\n  - a\n  - b", "served_model_name", ("a", "b")),
        ("drain_timeout: 1e3", "drain_timeout", 1000.0),
        ("seed: null", "seed", None),
        ("max_model_len:", "max_model_len", "auto"),
        ("max_num_seqs: &n 5\ntp: *n", "tp", 5),
        ("\ufefftp: 3", "tp", 3),
        ('{"model": {"tp": 3}}', "tp", 3),
        ("model: näme", "model", "näme"),
    ],
)
def test_value_is_the_text_that_stands_there(read: Read, content: str, field: str, expected: Any) -> None:
    assert getattr(read(content), field) == expected


@pytest.mark.parametrize(
    "content", ["", "\n\n", "# nothing\n", "---\n", "null", "scheduler:\n", "scheduler: {}\nmodel:\n", "{}"]
)
def test_file_that_sets_nothing_gives_the_defaults(read: Read, content: str) -> None:
    assert read(content) == Settings()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        # names
        ("a: 1\n", "run.yaml:1: no such setting: a; tpserve launch --help lists the settings"),
        ("\nmax_num_seq: 4\n", "run.yaml:2: no such setting: max_num_seq; did you mean max_num_seqs?"),
        ("scheduler:\n  max-num-seq: 4", "run.yaml:2: no such setting: max-num-seq; did you mean max_num_seqs?"),
        ("schedular:\n  max_num_seqs: 4", "run.yaml:1: no such section: schedular; there are model, scheduler, cache, server"),
        ("schedular: fcfs", "run.yaml:1: no such setting: schedular; did you mean scheduler?"),
        ("model:\n  max_num_seqs: 4", "run.yaml:2: max_num_seqs belongs in the section scheduler, not in model"),
        ("scheduler: fcfs", "run.yaml:1: scheduler is a section; write its settings below it, indented"),
        ("scheduler: [fcfs]", "run.yaml:1: scheduler is a section; write its settings below it, indented"),
        ("model:\n  quantization: awq", "run.yaml:2: quantization is not supported yet"),
        ("speculative_config: {model: x}", "run.yaml:1: speculative_config is not supported yet"),
        ("pipeline-parallel-size: 2", "run.yaml:1: pipeline-parallel-size 2 is not supported yet, only 1"),
        ("base: &b {tp: 2}\n", "run.yaml:1: no such section: base"),
        ("model:\n  <<: {tp: 2}", "run.yaml:2: no such section: <<"),
        ("? [a, b]\n: 3", "run.yaml:1: wants the name of a setting before the colon"),
        ("8000: port", "run.yaml:1: no such setting: 8000"),
        ("null: 3", "run.yaml:1: no such setting: null"),
        # given twice
        ("tp: 2\ntp: 2", "run.yaml:2: tp is given in line 1 already"),
        ("tp: 2\ntensor_parallel_size: 2", "run.yaml:2: tensor_parallel_size is given at run.yaml:1 already"),
        ("max_num_seqs: 2\nmax-num-seqs: 2", "run.yaml:2: max-num-seqs is given at run.yaml:1 already"),
        ("model:\n  path: a\n  model: b", "run.yaml:3: model is given at run.yaml:2 already"),
        ("model:\n  tp: 2\nscheduler:\nmodel:\n  dtype: half", "run.yaml:4: model is given in line 1 already"),
        (
            "scheduler:\n  policy: fcfs\n\nscheduling_policy: fcfs",
            "run.yaml:4: scheduling_policy is given at run.yaml:2 already",
        ),
        # values
        ("tp: two", "run.yaml:1: tp: two: must be a valid integer"),
        ("model:\n  tp: 1.5", "run.yaml:2: tp: 1.5: must be a valid integer"),
        ("tp: true", "run.yaml:1: tp: true: must be a valid integer"),
        ("tp: 0x10", "run.yaml:1: tp: 0x10: must be a valid integer"),
        ("tp: 2000-01-01", "run.yaml:1: tp: 2000-01-01: must be a valid integer"),
        ("kv_cache_memory: 1e9", "run.yaml:1: kv_cache_memory: 1e9: wants bytes, such as 2GiB or 500MB"),
        ("enable_prefix_caching: maybe", "run.yaml:1: enable_prefix_caching: maybe: must be a valid boolean"),
        ("scheduler: {policy: lifo}", "run.yaml:1: policy: lifo: must be 'fcfs'"),
        ("served_model_name: [a, '']", "run.yaml:1: served_model_name: a, : "),
        ("model:\n- path: a", "run.yaml:1: model wants one value, not a list"),
        ("tp: [2]", "run.yaml:1: tp wants one value, not a list"),
        ("tp: {n: 2}", "run.yaml:1: tp wants one value, not settings of its own"),
        ("served_model_name: [[a]]", "run.yaml:1: served_model_name wants one value, not a list"),
        ("model: &m [*m]", "run.yaml:1: model wants one value, not a list"),
        ("model: &m {path: *m}", "run.yaml:1: path wants one value, not settings of its own"),
        ("model: !!python/name:os.system x", "has the tag tag:yaml.org,2002:python/name:os.system; write a plain value"),
        ("model: !!binary aGk=", "run.yaml:1: model has the tag tag:yaml.org,2002:binary; write a plain value"),
        ("tp: !mine 2", "run.yaml:1: tp has the tag !mine; write a plain value"),
        # what is no YAML, or no settings
        ("hello", "run.yaml:1: wants settings, such as tp: 2, in sections or without"),
        ("\n- tp: 2", "run.yaml:2: wants settings"),
        ("model:\n\ttp: 2", "run.yaml:2: not YAML: found character '\\t' that cannot start any token"),
        ("model:\n  tp: 2\n dtype: half", "run.yaml:3: not YAML: "),
        ("tp: *n", "run.yaml:1: not YAML: found undefined alias"),
        ("tp: 2\n---\ntp: 3", "run.yaml:2: not YAML: "),
        ("tp: [2", "run.yaml:1: not YAML: "),
        ('model: "x', "run.yaml:1: not YAML: "),
        (b"tp: 2\n\xff\xfe", "run.yaml:2: not UTF-8 text; give a YAML file"),
        (b"tp: 2\nmodel: \x00", "run.yaml:2: not YAML: special characters are not allowed"),
        ("[" * 50_000, "config file run.yaml: nested too deeply"),
        ("#" * 70_000, "config file run.yaml: larger than 65536 bytes"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_line(refusal: Refusal, content: str | bytes, says: str) -> None:
    line = refusal(content)
    assert says in line
    assert line.startswith(("run.yaml:", "config file run.yaml:"))


def test_aliases_are_not_expanded(refusal: Refusal) -> None:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    assert refusal("\n".join(["a0: &a0 x", *levels])).startswith("run.yaml:1: no such setting: a0")


def test_foreign_settings_are_told_by_their_lines(read: Read) -> None:
    read(
        "tp: 2\nenforce-eager: true\nmodel:\n  swap_space: 4\npipeline_parallel_size: 1\nenable_lora: false\nquantization: ~\n"
    )
    assert config_file.read("run.yaml")[1] == [
        "run.yaml:2: enforce-eager has no effect here",
        "run.yaml:4: swap_space has no effect here",
    ]


def test_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    for name, says in {
        str(tmp_path / "none.yaml"): "No such file or directory",
        str(tmp_path): "Is a directory",
        "": "No such file or directory",
    }.items():
        with pytest.raises(UserError, match=says) as refusal:
            config_file.read(name)
        assert str(refusal.value).startswith(f"config file {name}: ")


def test_file_that_never_ends_is_refused() -> None:
    with pytest.raises(UserError, match="config file /dev/zero: larger than"):
        config_file.read("/dev/zero")


def test_file_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(UserError, match="config file /proc/self/mem: Input/output error"):
        config_file.read("/proc/self/mem")


def test_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("tp: 3")
    given, _ = config_file.read("~/run.yaml")
    assert given["tp"].source == "~/run.yaml:1"


def test_shown_settings_say_where_they_come_from() -> None:
    given = {"model": Given("m", "--model", ""), "seed": Given("5", "TPSERVE_SEED", ""), "tp": Given("2", "a b.yaml:3", "")}
    lines = config_file.show(sources.check(given), given).splitlines()
    shown = {line.partition(":")[0].strip(): line.partition(":")[2].split() for line in lines}
    assert shown["path"] == ["m", "#", "--model"]
    assert shown["seed"] == ["5", "#", "TPSERVE_SEED"]
    assert shown["tp"] == ["2", "#", "a", "b.yaml:3"]
    assert shown["policy"] == ["fcfs", "#", "default"]
    assert shown["kv_cache_memory"] == ["null", "#", "default"]
    assert len({line.find("#") for line in lines if "#" in line}) == 1


def test_every_setting_is_shown_once_but_those_for_tests() -> None:
    lines = config_file.show(Settings(), {}).splitlines()
    visible = [field for field, flag in spellings.FLAGS.items() if not flag.hidden]
    assert len([line for line in lines if line.endswith("  # default")]) == len(visible)
    assert [line for line in lines if "#" not in line] == ["model:", "scheduler:", "cache:", "server:"]


NAMES = st.text(min_size=1, max_size=20)


@at_most(max_examples=40)
@example(model="\x85", names=["a\u2028b", "\ttab"], number=1, seconds=0.0, switch=False, source="x")
@generated(
    model=NAMES,
    names=st.lists(NAMES, max_size=3),
    number=st.integers(1, 1000),
    seconds=st.floats(0, 1e300),
    switch=st.booleans(),
    source=NAMES,
)
def test_shown_settings_can_be_read_again(
    tmp_path_factory: pytest.TempPathFactory,
    model: str,
    names: list[str],
    number: int,
    seconds: float,
    switch: bool,
    source: str,
) -> None:
    settings = Settings(
        model=model,
        served_model_name=tuple(names),
        max_model_len=number + 1,
        kv_cache_memory=number,
        drain_timeout=seconds,
        enable_chunked_prefill=switch,
    )
    file = tmp_path_factory.getbasetemp() / "shown.yaml"
    file.write_text(config_file.show(settings, {field: Given(None, source, "") for field in Settings.model_fields}))
    given, notes = config_file.read(str(file))
    assert sources.check(given) == settings
    assert notes == []
