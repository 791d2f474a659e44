"""The library's gRPC client: a streamed answer that outlives a server if there is another, and tokens per full pass.

python examples/grpc_client.py 127.0.0.1:9000 [another ...]
"""

import os
import sys

from cascade.client import Client
from cascade.params import SamplingParams

addresses = sys.argv[1:] or ["127.0.0.1:9000"]
with Client(addresses, api_key=os.environ.get("CASCADE_API_KEY")) as client:
    print(" -> ".join(tier.name for tier in client.describe().tiers))
    for chunk in client.stream("def fibonacci(n):", SamplingParams(max_tokens=48, temperature=0)):
        print(chunk.text, end="", flush=True)
        if chunk.completion is not None:
            print(f"\n{chunk.completion.stats.tokens_per_full_pass:.2f} tokens per full pass")
