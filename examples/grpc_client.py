"""The library's gRPC client: a streamed answer, and tokens per full pass.  python examples/grpc_client.py 127.0.0.1:9000"""

import os
import sys

from cascade.client import Client
from cascade.params import SamplingParams

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9000"
with Client(address, api_key=os.environ.get("CASCADE_API_KEY")) as client:
    print(" -> ".join(tier.name for tier in client.describe().tiers))
    for chunk in client.stream("def fibonacci(n):", SamplingParams(max_tokens=48, temperature=0)):
        print(chunk.text, end="", flush=True)
        if chunk.completion is not None:
            print(f"\n{chunk.completion.stats.tokens_per_full_pass:.2f} tokens per full pass")
