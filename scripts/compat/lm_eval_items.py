"""lm-eval's local-completions against its hf backend: each item's log-likelihood. python lm_eval_items.py URL MODEL_FOLDER

The items are cut from the texts in tests/fixtures: a beginning and two continuations, its own and another's. Beside
them some in which the right continuation is the likeliest, so that both values of `is_greedy` occur.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from checks import run
from lm_eval.tasks import TaskManager

URL, FOLDER = sys.argv[1], sys.argv[2]
FIXTURES = Path(__file__).resolve().parents[2] / "tests/fixtures"
ITEMS = 200  # of English text
TOLERANCE = 1e-3
TASK = """\
task: cut_texts
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{beginning}}}}"
doc_to_choice: "{{{{continuations}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""
OTHER_SCRIPTS = [
    "Привет, мир!",
    "你好世界。",
    "नमस्ते दुनिया",
    "שלום עולם",
    "😀 🎉 👩‍👩‍👧‍👦",
    "e\u0301a\u0308n\u0303 naïve",
    "  two   spaces",
    "a\n\n\nb\tc",
]


def items() -> list[dict[str, Any]]:
    """Beginning, and continuations of which the first is right."""
    words = gzip.decompress((FIXTURES / "jargon_file.txt.gz").read_bytes()).decode(errors="replace").split()
    rng = random.Random(1)
    cuts = []
    for _ in range(ITEMS):
        start, length, more = rng.randrange(len(words) - 100), rng.randrange(1, 40), rng.randrange(1, 12)
        cuts.append((" ".join(words[start : start + length]), " " + " ".join(words[start + length : start + length + more])))
    counting = [(", ".join(map(str, range(n, n + 8))) + ",", f" {n + 8}, {n + 9}") for n in range(1, 21)]
    scripts = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in OTHER_SCRIPTS]
    pairs = cuts + counting + scripts
    others = [continuation for _, continuation in pairs[1:] + pairs[:1]]
    return [{"beginning": a, "continuations": [b, other]} for (a, b), other in zip(pairs, others)]


def loglikelihoods(folder: Path, backend: str, **arguments: Any) -> list[tuple[float, bool]]:
    """(log-likelihood, whether it is the likeliest) of each continuation of each item, as a backend of lm-eval has them."""
    found = lm_eval.simple_evaluate(
        model=backend, model_args=arguments, tasks=["cut_texts"], task_manager=TaskManager(include_path=str(folder)),
        batch_size=16, log_samples=True, bootstrap_iters=0, verbosity="ERROR",
    )  # fmt: skip
    samples = sorted(found["samples"]["cut_texts"], key=lambda sample: sample["doc_id"])
    return [(float(answer[0][0]), str(answer[0][1]) == "True") for sample in samples for answer in sample["resps"]]


def local_completions_equals_hf() -> str:
    """Ids as lm-eval's own tokenizer has them; then texts, which the server tokenizes."""
    with tempfile.TemporaryDirectory() as name:
        folder, made = Path(name), items()
        (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in made))
        (folder / "cut_texts.yaml").write_text(TASK.format(file=folder / "items.jsonl"))
        expected = loglikelihoods(folder, "hf", pretrained=FOLDER, dtype="float32", device="cpu")
        server: dict[str, Any] = {"model": "demo", "base_url": f"{URL}/v1/completions", "tokenizer": FOLDER, "max_retries": 1}
        server |= {"tokenizer_backend": "huggingface", "num_concurrent": 8}
        found = loglikelihoods(folder, "local-completions", **server)
    assert len(found) == len(expected) == 2 * len(made) >= 400
    worst = max(abs(a - b) for (a, _), (b, _) in zip(found, expected))
    flags = sum(a != b for (_, a), (_, b) in zip(found, expected))
    greedy = sum(flag for _, flag in expected)
    seen = f"{len(made)} items, largest difference {worst:.1e}, is_greedy differs {flags} times and is true {greedy} times"
    assert worst <= TOLERANCE, seen
    assert flags == 0, seen
    assert greedy > 0, seen
    return seen


if __name__ == "__main__":
    sys.exit(run([local_completions_equals_hf]))
