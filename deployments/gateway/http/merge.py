"""The pieces of several answers in one stream."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from cascade.answer import Chunk
from deployments.gateway.admission.status import refusal
from deployments.gateway.chat.reader import TurnReader
from deployments.gateway.http.reply import DONE, Echo, Form, closing, counted, event, opening, piece, whole

Pieces = AsyncGenerator[tuple[int, Chunk], None]


async def merged(sources: Sequence[AsyncGenerator[Chunk, None]]) -> Pieces:
    """The pieces of all answers as they come, with the index of their answer. One that fails ends them all."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(1)  # a client that does not read stalls them all
    tasks = [asyncio.create_task(_feed(queue, index, source)) for index, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gathered(form: Form, pieces: Pieces, echoes: Sequence[Echo]) -> dict[str, object]:
    """The whole answer."""
    answers: list[list[Chunk]] = [[] for _ in echoes]
    async with contextlib.aclosing(pieces):
        async for index, chunk in pieces:
            answers[index].append(chunk)
    return whole(form, answers, echoes)


async def streamed(
    form: Form, pieces: Pieces, echoes: Sequence[Echo], known: Sequence[Chunk] | None = None
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, after what the client has. What fails after the first piece is an event too."""
    readers = [None if form.reader is None else form.reader() for _ in echoes]
    lengths = _resumed(echoes, readers, known or ())  # characters of each choice so far
    ended, told = [], False
    num_tokens = sum(len(chunk.token_ids) for chunk in known or ())
    try:
        async with contextlib.aclosing(pieces):
            async for index, chunk in pieces:
                head = None if index in lengths else opening(form, index, echoes[index], chunk)
                offset = lengths.setdefault(index, len(echoes[index].text))
                lengths[index] += len(chunk.text)
                num_tokens += len(chunk.token_ids)
                if chunk.completion is not None:
                    ended.append(chunk.completion)
                said = [part for part in (head, piece(form, index, chunk, offset, readers[index])) if part is not None]
                if form.prompt_tokens is not None:
                    said = [part | {"usage": counted(form.prompt_tokens, num_tokens)} for part in said]
                if said:
                    told = True
                    yield b"".join(map(event, said))
    except Exception as error:
        if not told:
            raise
        yield event(refusal(error).body)
        return
    if form.usage:
        yield event(closing(form, ended, readers))
    yield DONE


def _resumed(echoes: Sequence[Echo], readers: Sequence[TurnReader | None], known: Sequence[Chunk]) -> dict[int, int]:
    """Characters of the choices that clients have a part of, which their readers have read."""
    lengths = {}
    for index, chunk in enumerate(known):
        if chunk.token_ids:
            lengths[index] = len(echoes[index].text) + len(chunk.text)
            if (reader := readers[index]) is not None:
                reader.take(chunk)
    return lengths


async def _feed(
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]], index: int, source: AsyncGenerator[Chunk, None]
) -> None:
    try:
        async with contextlib.aclosing(source) as chunks:
            async for chunk in chunks:
                await queue.put((index, chunk))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))
