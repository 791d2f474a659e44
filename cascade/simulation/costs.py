"""The time of a pass on a device that is not at hand, computed from the model's size and the device's data sheet.

A pass of few tokens takes as long as reading its weights from memory, plus its launches. Above some number of tokens,
arithmetic takes longer than reading. Assumptions:

- `BANDWIDTH`: the share of the data sheet's bandwidth that decoding reaches. 0.78 for Llama 3.2 1B (Hazy Research, "Look Ma, No
  Bubbles!", 2025), 0.84 for large matrices alone.
- `ARITHMETIC`: the share of the data sheet's FLOP/s (bfloat16, dense) that large passes reach.
- `KERNELS` kernels a layer, each with `KERNEL_S` seconds in which no weights come, and `LAUNCH_S` a pass for the launch of its
  CUDA graph, its inputs and sampling. One check: the formula gives Llama 3.2 1B (16 layers, 2.47 GB) 1.47 ms on an H100, which
  is 50 % of the peak bandwidth, what the same article found vLLM and SGLang to reach.
- Ranks of tensor parallelism share weights and arithmetic evenly, and exchange twice a layer in `EXCHANGE_S` each.
"""

from dataclasses import dataclass

from cascade.planner.cost import Profile

BANDWIDTH, ARITHMETIC = 0.80, 0.65
KERNELS, KERNEL_S = 10, 2.5e-6
LAUNCH_S = 0.15e-3
EXCHANGE_S = 10e-6
MOST_TOKENS = 512  # tokens of the largest pass that is computed; larger ones are extrapolated


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Peak figures of a data sheet."""

    bytes_s: float  # memory bandwidth, bytes a second
    flop_s: float  # dense FLOP a second in bfloat16


# by Ray's names of accelerators
ACCELERATORS = {
    "B200": Accelerator(8.0e12, 2250e12),
    "H200": Accelerator(4.8e12, 989e12),
    "H100": Accelerator(3.35e12, 989e12),
    "A100-80G": Accelerator(2.04e12, 312e12),
    "L40S": Accelerator(0.864e12, 362e12),
    "A10G": Accelerator(0.6e12, 70e12),
    "L4": Accelerator(0.3e12, 121e12),
}
H100 = ACCELERATORS["H100"]


@dataclass(frozen=True, slots=True)
class Load:
    """The amounts that a pass of a model reads and computes."""

    read_bytes: int  # weights that every pass reads
    parameters: int  # parameters that multiply each token
    layers: int
    kv_bytes: int  # keys and values of a position

    def seconds(self, tokens: int, device: Accelerator, ranks: int = 1) -> float:
        """Seconds of a pass of ``tokens``, without context."""
        reading_s = self.read_bytes / (BANDWIDTH * device.bytes_s)
        computing_s = 2 * self.parameters * tokens / (ARITHMETIC * device.flop_s)
        exchanges_s = 2 * self.layers * EXCHANGE_S if ranks > 1 else 0.0
        return LAUNCH_S + self.layers * KERNELS * KERNEL_S + exchanges_s + max(reading_s, computing_s) / ranks

    def context_s(self, device: Accelerator, ranks: int = 1) -> float:
        """Seconds that each position held by a session adds to a pass."""
        return self.kv_bytes / (BANDWIDTH * device.bytes_s) / ranks

    def free_tokens(self, device: Accelerator) -> int:
        """Tokens of the largest pass that takes no longer than a pass of one token."""
        reading_s = self.read_bytes / (BANDWIDTH * device.bytes_s)
        return max(1, int(reading_s * ARITHMETIC * device.flop_s / (2 * self.parameters)))

    def profile(self, device: Accelerator, ranks: int = 1) -> Profile:
        """The pass times for the planner: constant while reading weights dominates, then linear."""
        sizes = sorted({1, self.free_tokens(device), max(MOST_TOKENS, 2 * self.free_tokens(device))})
        points = [(tokens, self.seconds(tokens, device, ranks)) for tokens in sizes]
        return Profile(points, self.context_s(device, ranks))


# Qwen3 in bfloat16, by published configurations; where the output embedding is the input embedding (0.6B, 4B), passes read that
TRIO = {
    "Qwen3-0.6B": Load(2 * 595_984_384, 595_984_384, 28, 114_688),
    "Qwen3-4B": Load(2 * 4_022_272_000, 4_022_272_000, 36, 147_456),
    "Qwen3-32B": Load(2 * 31_983_534_080, 31_983_534_080, 64, 262_144),
}
QWEN3 = tuple(load.profile(H100) for load in TRIO.values())  # prices of their passes, bottom to top, an H100 each


def flat(*pass_ms: float) -> tuple[Profile, ...]:
    """Profiles of passes that take ``pass_ms`` for up to 256 tokens, and twice as long for 512; in the same order."""
    return tuple(Profile([(1, ms / 1e3), (256, ms / 1e3), (512, ms / 500)]) for ms in pass_ms)
