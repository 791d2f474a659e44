"""What a pass takes of a published trio on published devices: Qwen3 0.6B, 4B and 32B in bfloat16, an H100 SXM for each.

`emulated.yaml` has what follows from it (a test compares them). What is assumed of devices: `cascade.simulation.costs`.
Shapes are those of the models' published configurations. A pass reads all weights but the input embedding, of which it needs a
row for each token; where output and input embedding are one, as in the smaller two, it reads that.
"""

from dataclasses import dataclass

from cascade.simulation.costs import ACCELERATORS, MOST_TOKENS, Load

H100 = ACCELERATORS["H100"]
BYTES = 2  # bytes of a number


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Qwen3 model, as in its ``config.json``."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151_936

    @property
    def read(self) -> int:
        """Parameters that a pass reads: all layers, and the output embedding."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden

    @property
    def load(self) -> Load:
        kv_bytes = 2 * self.layers * self.kv_heads * self.head_dim * BYTES
        return Load(BYTES * self.read, self.read, self.layers, kv_bytes)

    @property
    def pass_ms(self) -> dict[int, float]:
        """Milliseconds by tokens, for `EmulatedConfig.pass_ms`: of one, of most that cost no more, of most of all."""
        sizes = (1, self.load.free_tokens(H100), MOST_TOKENS)
        return {tokens: round(1e3 * self.load.seconds(tokens, H100), 2) for tokens in sizes}

    @property
    def context_ms(self) -> float:
        """Milliseconds that 1,000 positions held add."""
        return round(1e6 * self.load.context_s(H100), 3)


TRIO = (
    Shape("Qwen3-0.6B", 1024, 3072, 28, 16),
    Shape("Qwen3-4B", 2560, 9728, 36, 32),
    Shape("Qwen3-32B", 5120, 25600, 64, 64),
)
