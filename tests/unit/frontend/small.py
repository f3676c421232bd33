"""A small model as the frontend sees it: a byte-level tokenizer, a chat template, a deployment."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.specs import llama_spec
from tpserve.deployment import Deployment
from tpserve.settings import Settings

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
END = 0  # id of <|end|>
WORDS = "the quick brown fox jumps over the lazy dog and then the dog sleeps by the sea  while   the fox    runs away"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'alien' %}{{ raise_exception('no role alien here') }}{% endif %}"
    "<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(folder: Path) -> Path:
    """Byte-level BPE of 300 ids, three of them special, and a chat template. Returns the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([WORDS] * 5, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return folder


def deployment(folder: Path) -> Deployment:
    """A server of that model with room for 100 tokens; the model knows ten ids that the tokenizer does not."""
    spec = llama_spec(vocab=310, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=64, max_position=128)
    return Deployment(
        settings=Settings(model=str(folder), tp=2), model_path=str(folder), tokenizer_path=str(folder),
        served_names=("small", "also-small"),
        spec=spec, device="cpu", dtype="float32", page_size=16, num_pages=64, max_model_len=100, max_num_seqs=8,
        max_num_batched_tokens=64, stop_ids=(END,), threads_per_rank=1,
    )  # fmt: skip
