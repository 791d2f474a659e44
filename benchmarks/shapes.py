"""Models made on the spot: weights at random, in the shapes of published ones."""

import copy
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

from cascade.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model of the Qwen2 architecture."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool  # embedding and output layer are one

    def config(self) -> Qwen2Config:
        return Qwen2Config(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
            max_position_embeddings=32768,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )


SHAPES = {
    "0.5b": Shape(896, 4864, 24, 14, 2, 151936, True),
    "7b": Shape(3584, 18944, 28, 28, 4, 152064, False),
    "32b": Shape(5120, 27648, 64, 40, 8, 152064, False),
    "tiny": Shape(64, 128, 2, 4, 2, 512, True),
}


@torch.no_grad()
def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A network with random weights that say different things in different contexts."""
    with torch.device(device):
        network = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype)
    torch.manual_seed(0)
    for weight in network.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1.2 * weight.shape[1] ** -0.5)
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0
    return network.eval()


def copied(network: PreTrainedModel) -> PreTrainedModel:
    """Another network with the very same weights, which may go another path."""
    return copy.deepcopy(network, {id(weight): weight for weight in network.parameters()})


@torch.no_grad()
def worse(network: PreTrainedModel) -> PreTrainedModel:
    """A drafter: the network with noise on its weights."""
    drafter = copy.deepcopy(network)
    torch.manual_seed(1)
    for weight in drafter.parameters():
        if weight.dim() > 1:
            weight.add_(torch.randn_like(weight), alpha=0.02 * weight.shape[1] ** -0.5)
    return drafter


def words(vocab: int) -> Tokenizer:
    """A tokenizer that has a word for every id."""
    backend = FastTokenizer(WordLevel({str(token): token for token in range(vocab)}, unk_token="0"))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), frozenset())
