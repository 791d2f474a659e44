"""A conversation over gRPC: a tool is called, then words stream.  python examples/grpc_chat.py 127.0.0.1:9000"""

import json
import os
import sys

from cascade.client import Client
from cascade.params import SamplingParams

weather = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
messages = [{"role": "user", "content": "How will the weather be in Paris?"}]
address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9000"
with Client(address, api_key=os.environ.get("CASCADE_API_KEY")) as client:
    turn = client.chat(
        messages,
        SamplingParams(max_tokens=200),
        tools=[{"type": "function", "function": weather}],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},  # enforced, whatever the model
    )
    messages.append(turn.message)
    for call in turn.calls:
        print(call.name, json.loads(call.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sun, then rain."})
    for piece in client.stream_chat(messages, SamplingParams(max_tokens=48, temperature=0)):
        print(piece.content, end="", flush=True)
    print()
