"""A trio for which three tiers pay, served: passes of 80, 20 and 2 ms, and drafts that agree in 0.70 and 0.88 of positions.

It is a row of the map (`benchmarks.map`). Its tiers are toys, so texts mean nothing; all else is the server.
"""

from cascade import family
from cascade.engine.model_config import read_config
from cascade.messages import SessionSpec
from cascade.params import SamplingParams
from cascade.simulation.plan import chained
from cascade.simulation.recording import RecordedText, Recording
from cascade.simulation.toy_tier import ToyTier
from cascade.splitmix import mix

AGREEMENT = (0.70, 0.88)  # of tiny and medium with full
PASS_MS = tuple({1: ms, 256: ms, 512: 2 * ms} for ms in (2.0, 20.0, 80.0))  # bottom to top
PROMPTS, PROMPT_TOKENS = 8, 48


def recording(tokens: int, prompts: int = PROMPTS) -> Recording:
    """Texts of so many tokens that the full toy writes, with own tokens of the toys below it."""
    vocab, shares = read_config(family.paths()[0]).get_text_config().vocab_size, chained(AGREEMENT)
    toys = [ToyTier(vocab, shares[level:]) for level in range(len(shares) + 1)]
    texts = []
    for number in range(prompts):
        prompt = tuple(mix(number * PROMPT_TOKENS + place) % vocab for place in range(PROMPT_TOKENS))
        params = SamplingParams(max_tokens=tokens, temperature=0, seed=number)
        text = full_text(toys[-1], SessionSpec(prompt, len(prompt), params))
        places = range(len(prompt), len(text))
        ranked = (tuple(tuple(toy.ranked(tuple(text[at - toy.order : at]), at, params, 3)) for at in places) for toy in toys)
        texts.append(RecordedText(prompt, tuple(ranked), "toy"))
    return Recording(tuple(texts))


def full_text(model: ToyTier, spec: SessionSpec) -> list[int]:
    """Prompt and output of plain decoding by ``model`` alone, token by token: what any cascade below it must give."""
    text, limit = list(spec.tokens), spec.prompt_len + spec.params.max_tokens
    while len(text) < limit and not (len(text) > spec.prompt_len and text[-1] in spec.ends):
        [own] = model.ranked(tuple(text[-model.order :]), len(text), spec.params, 1)
        text.append(own.token)
    return text
