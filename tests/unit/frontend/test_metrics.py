from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.frontend.rig import Rig, in_loop, rig, wait_for
from tpserve.deployment import Deployment
from tpserve.messages import STEP_PARTS, Finish, Stats, Submit

NAMES = [
    "requests_running", "requests_waiting", "kv_pages_used", "kv_pages_total", "kv_tokens", "kv_cache_usage_ratio",
    "request_wait_seconds",
    "time_to_first_token_seconds", "time_per_output_token_seconds", "request_latency_seconds", "requests_total",
    "prompt_tokens_total", "generated_tokens_total", "prefix_cache_hit_tokens_total", "preemptions_total", "step_seconds",
    "collectives_total", "plan_bytes_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
]  # fmt: skip


async def samples(r: Rig) -> dict[str, float]:
    """Every sample as it is served, its other labels in its name."""
    out = {}
    for family in text_string_to_metric_families((await r.client.get("/metrics")).text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "small"
            out[sample.name + "".join(f"[{value}]" for value in labels.values())] = sample.value
    return out


@in_loop
async def test_every_figure_is_there_from_the_start(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        shown = await samples(r)
        for name in NAMES:
            assert any(sample.split("[")[0] in (f"tpserve_{name}", f"tpserve_{name}_count") for sample in shown), name
        assert shown["tpserve_kv_pages_total"] == 64
        assert not any("created" in name for name in shown)


@in_loop
async def test_engines_counts_are_shown(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        await r.coordinator.say(Stats(1, 2, 16, 64, 250, 5, 6, 11, 10, 7, 8, 9))
        await wait_for(lambda: r.metric("requests_running"))
        shown = await samples(r)
        expected = {
            "requests_running": 1, "requests_waiting": 2, "kv_pages_used": 16, "kv_pages_total": 64, "kv_tokens": 250,
            "kv_cache_usage_ratio": 0.25, "preemptions_total": 5, "prefix_cache_hit_tokens_total": 6,
            "spec_decode_num_draft_tokens_total": 11, "spec_decode_num_accepted_tokens_total": 10, "plan_bytes_total": 7,
            "collectives_total[all_reduce]": 8, "collectives_total[all_gather]": 9,
        }  # fmt: skip
        assert {name: shown[f"tpserve_{name}"] for name in expected} == expected
        await r.coordinator.say(Stats(0, 0, 0, 64, 0, 5, 6, 11, 10, 7, 8, 9))


@in_loop
async def test_tokens_and_ends_add_up_with_usage(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        usages = []
        for body in ({}, {"prompt": ["a", "b"]}, {"n": 2, "stop": "o"}):
            sent = r.complete(**body)
            for _ in body.get("prompt", [0]):
                submit = await r.coordinator.next(Submit)
                for choice in submit.choices.tolist():
                    await r.coordinator.generate(submit, [*r.ids("the dog"), 0], Finish.STOP, choice)
            usages.append((await sent).json()["usage"])
        shown = await samples(r)
        assert shown["tpserve_generated_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
        assert shown["tpserve_prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
        assert shown["tpserve_requests_total[stop]"] == 5
        for name in ("time_to_first_token_seconds", "time_per_output_token_seconds", "request_latency_seconds"):
            assert shown[f"tpserve_{name}_count"] == 5


@in_loop
async def test_steps_and_waits_are_observed(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        await r.coordinator.tokens()
        await wait_for(lambda: r.metric("request_wait_seconds_count"))
        shown = await samples(r)
        assert shown["tpserve_request_wait_seconds_sum"] == 0.25
        parts = [shown[f"tpserve_step_seconds_sum[{part}]"] for part in STEP_PARTS]
        assert parts == pytest.approx([number / 1000 for number in range(1, len(STEP_PARTS) + 1)])
