"""Text that a model writes. Drafters are trained and judged on it, because it is what they guess when they serve."""

import torch
from transformers import LlamaForCausalLM


@torch.inference_mode()
def continuations(
    model: LlamaForCausalLM, prompts: torch.Tensor, num_tokens: int, *, temperature: float, seed: int = 0
) -> torch.Tensor:
    """Prompts ``[rows, prompt]`` with ``num_tokens`` more tokens each, ``[rows, prompt + num_tokens]`` int64.

    The end-of-text token is never written, so that all rows are equally long.
    """
    torch.manual_seed(seed)
    sampling = {"do_sample": temperature > 0} | ({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {})
    written: torch.Tensor = model.generate(
        prompts.to(model.device),
        attention_mask=torch.ones_like(prompts, device=model.device),
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        pad_token_id=model.config.eos_token_id,
        **sampling,
    )
    return written.cpu()
