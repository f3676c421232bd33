"""Tiny model folders with random float32 weights, written by transformers: quick to load, and nothing in them is even."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Tiny:
    """Sizes of a Llama (`hidden` a multiple of `heads`). By default groups, vocabulary and MLP blocks are uneven."""

    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 8
    layers: int = 2
    hidden: int = 54
    intermediate: int = 233
    vocab: int = 257  # a prime, and just the tokenizer's size
    attention_bias: bool = True
    mlp_bias: bool = True
    tie: bool = False
    max_position: int = 1024
    seed: int = 0

    def write(self, folder: Path) -> Path:
        """Write the model with a byte-level tokenizer; its id 0 ends an answer. Returns the folder."""
        return write(self.model(), folder)

    def model(self) -> Any:
        """The same model as transformers has it."""
        from transformers import LlamaConfig

        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            attention_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            tie_word_embeddings=self.tie,
            max_position_embeddings=self.max_position,
            bos_token_id=None,
            eos_token_id=0,
        )
        return random_model(config, self.seed)


def random_model(config: Any, seed: int = 0) -> Any:
    """The model of a transformers config, in float32; biases and norms are random too, so that a lost one shows."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(0.2 * noise + (name.endswith("weight") and not config.model_type.startswith("gemma")))
            elif "embed" in name:
                parameter.copy_(noise)
            elif parameter.ndim == 2:  # of unit gain, so that no layer's part is lost beside another's
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(0.2 * noise)
    return model


def write(model: Any, folder: Path) -> Path:
    """Write a model of transformers with a byte-level tokenizer, whose id 0 ends an answer. Returns the folder."""
    model.save_pretrained(folder)
    tokenizer(model.config.vocab_size).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tokenizer(vocab: int) -> Tokenizer:
    """Byte-level without merges; in a small vocabulary ASCII comes first and other bytes have no id."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: (letter > "~", letter != "Ġ", letter))
    made = Tokenizer(models.BPE({letter: id for id, letter in enumerate([END, *letters][:vocab])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    return made
