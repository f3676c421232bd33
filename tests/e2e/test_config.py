"""A server that takes its settings from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server import Server

FILE = """\
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


@pytest.mark.slow
def test_server_runs_from_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    with Server("--model", "demo", "--config", tmp_path / "run.yaml") as server:
        assert server.text("1, 2, 3, 4, 5,", max_tokens=24, temperature=0) == " 6, 7, 8, 9, 10, 11, 12,"
        with server.client() as client:
            (model,) = client.get("/v1/models").json()["data"]
        # Without chunks a prompt has to fit into one step.
        assert model["max_model_len"] == 4096
        assert "--max-num-batched-tokens 4096 is the most tokens of a prompt too" in server.log
