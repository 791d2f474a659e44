"""Trained models as folders that ``from_pretrained`` loads."""

import copy
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer to ``folder``; ``model`` itself stays as it is."""
    shipped = copy.deepcopy(model).to("cpu", torch.bfloat16).eval()
    end_id = tokenizer.eos_token_id
    shipped.generation_config = GenerationConfig(bos_token_id=end_id, eos_token_id=end_id, pad_token_id=end_id)
    shipped.save_pretrained(folder)
    # rebuilt, because one that was loaded also saves how it was loaded
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        clean_up_tokenization_spaces=False,
        model_max_length=model.config.max_position_embeddings,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner alone
