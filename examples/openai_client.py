"""OpenAI's own client: a whole answer, then one in pieces.  python examples/openai_client.py http://127.0.0.1:8000"""

import os
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
with OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("CASCADE_API_KEY", "none")) as client:
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, prompt="def fibonacci(n):", max_tokens=48, temperature=0)
    print(answer.choices[0].text)

    messages = [{"role": "user", "content": "import os\n\ndef size(path):"}]
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=48,
        seed=1,
        stream=True,
        extra_body={"speculation": {"window": 8}, "top_k": 40},  # beyond OpenAI: how drafts are used, and more sampling
    )
    for piece in stream:
        print(piece.choices[0].delta.content or "", end="", flush=True)
    print()
