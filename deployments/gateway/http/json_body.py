"""Parses bodies as JSON, more strictly than Python: UTF-8, no repeated names in an object, no lone surrogates."""

import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from cascade.params import LONE_SURROGATE

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # JSON's escape of half a character


class JsonRoute(APIRoute):
    """A route that parses its body with `parsed`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return strictly


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parsed(await self.body())


def parsed(body: bytes) -> Any:
    """The value of a body; raises `json.JSONDecodeError`, whose message says what is wrong."""
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_object)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError:
        reason = "it is not in UTF-8"
    except UnicodeEncodeError:
        reason = LONE_SURROGATE
    except (ValueError, RecursionError):
        reason = "it is nested too deeply, or a number has too many digits"
    raise json.JSONDecodeError(reason, "", 0)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):  # Python would silently take the last one
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise json.JSONDecodeError(f"{twice[:60]!r} is given twice", "", 0)
    return members
