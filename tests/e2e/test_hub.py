"""A model by its Hub id: fetched from an endpoint, served, and served again without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub_endpoint import Repository, endpoint
from tests.server import Server

OPTIONS = ("--tp", "2", "--dtype", "float32", "--kv-cache-memory", "64MiB")


@pytest.mark.slow
def test_hub_id_is_fetched_and_served_and_later_served_offline(tiny_model: Path, tiny_server: Server, tmp_path: Path) -> None:
    prompt = [5, 6, 7, 8]
    expected = tiny_server.text(prompt, max_tokens=8, temperature=0, ignore_eos=True)
    with endpoint() as there:
        there.repositories["org/tiny"] = Repository.of_folder(tiny_model, **{"pytorch_model.bin": b"not wanted"})
        env = {"HF_ENDPOINT": there.url, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "NO_PROXY": "*"}
        with Server("--model", "org/tiny", *OPTIONS, env=env) as server:
            with server.client() as client:
                assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["org/tiny"]
            assert server.text(prompt, model="org/tiny", max_tokens=8, temperature=0, ignore_eos=True) == expected
            assert len(server.stdout) == 1
            assert "%|" not in server.log  # no progress bars, as stderr is no terminal
        assert "model.safetensors" in there.sent
        assert "pytorch_model.bin" not in there.sent
    with Server("--model", "org/tiny", *OPTIONS, env=env | {"HF_HUB_OFFLINE": "1"}) as server:
        assert server.text(prompt, max_tokens=8, temperature=0, ignore_eos=True) == expected
