"""A small teacher with random weights, large enough to disagree with its pieces."""

from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def _weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for name, weight in model.named_parameters():
        if name == "model.norm.weight":
            torch.nn.init.uniform_(weight, 1.45, 1.55)  # tied embeddings fold it in row by row: see `cut`
        elif "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
        elif "embed" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model.state_dict()


def teacher() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**CONFIG.to_dict()))
    model.load_state_dict(_weights())
    return model.eval()
