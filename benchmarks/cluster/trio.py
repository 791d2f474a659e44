"""What a pass takes of a published trio on published devices: Qwen3 0.6B, 4B and 32B in bfloat16, an H100 SXM for each.

All that is assumed stands here, and `emulated.yaml` has what follows from it (a test compares them). A pass of few tokens takes
as long as its weights take to come from memory, and what its launches cost beside that:

- Shapes are those of the models' published configurations. A pass reads all weights but the input embedding, of which it needs
  a row for each token; where output and input embedding are one, as in the smaller two, it reads that.
- An H100 SXM reads 3.35 TB/s at its peak (NVIDIA's data sheet). 80 % of it is what the best kernels reach in a decoding model:
  78 % for Llama 3.2 1B (Hazy Research, "Look Ma, No Bubbles!", 2025), 84 % for large matrices alone.
- Launches are in CUDA graphs, some ten kernels a layer. Each is taken to cost 2.5 microseconds in which no weights come, and
  a pass 0.15 ms for the graph's own launch, inputs and sampling. Both are assumptions, with one check: the same formula gives
  Llama 3.2 1B (16 layers, 2.47 GB) 1.47 ms, which is 50 % of the peak, what that article found vLLM and SGLang to reach.
- From some 240 tokens on arithmetic takes longer than reading: 989 TFLOP/s (data sheet), of which 65 % are reached.
- Keys and values are bfloat16, and read at the same speed.
"""

from dataclasses import dataclass

BYTES_S = 0.80 * 3.35e12
FLOP_S = 0.65 * 989e12
KERNELS, KERNEL_S = 10, 2.5e-6  # of a layer; of each, in which no weights come
LAUNCH_S = 0.15e-3  # of a pass
BYTES = 2  # of a number
MOST_TOKENS = 512  # of a pass


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
    def kv_bytes(self) -> int:
        """Of keys and values of a position."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES

    @property
    def launch_s(self) -> float:
        return LAUNCH_S + self.layers * KERNELS * KERNEL_S

    def seconds(self, tokens: int) -> float:
        """Of a pass of so many tokens, without context."""
        return self.launch_s + max(BYTES * self.read / BYTES_S, 2 * self.read * tokens / FLOP_S)

    @property
    def pass_ms(self) -> dict[int, float]:
        """Milliseconds by tokens, for `EmulatedConfig.pass_ms`: of one, of most that cost no more, of most of all."""
        free = int(FLOP_S / BYTES_S * BYTES / 2)
        return {tokens: round(1e3 * self.seconds(tokens), 2) for tokens in (1, free, MOST_TOKENS)}

    @property
    def context_ms(self) -> float:
        """Milliseconds that 1,000 positions held add."""
        return round(1e6 * self.kv_bytes / BYTES_S, 3)


TRIO = (
    Shape("Qwen3-0.6B", 1024, 3072, 28, 16),
    Shape("Qwen3-4B", 2560, 9728, 36, 32),
    Shape("Qwen3-32B", 5120, 25600, 64, 64),
)
