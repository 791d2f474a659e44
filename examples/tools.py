"""A call of a tool, by OpenAI's client: `python examples/tools.py http://127.0.0.1:8000`."""

import json
import os
import sys

from openai import OpenAI

weather = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
with OpenAI(base_url=f"{sys.argv[1]}/v1", api_key=os.environ.get("CASCADE_API_KEY", "none")) as client:
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "How will the weather be in Paris?"}],
        tools=[{"type": "function", "function": weather}],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},  # enforced, whatever the model
        max_completion_tokens=200,
    )
for call in answer.choices[0].message.tool_calls or ():
    print(call.function.name, json.loads(call.function.arguments))
