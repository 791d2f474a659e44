"""Completions and chat completions in OpenAI's form, as whole bodies and as streams."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cascade.answer import Chunk, Completion, PromptToken, joined
from cascade.engine.spelling import Spelling
from cascade.errors import CascadeError
from cascade.messages import Logprobs
from deployments.gateway.chat.reader import TurnReader
from deployments.gateway.http.events import Reply, event
from deployments.gateway.http.openai import AnswersBody, ChatBody, UsageOptions

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt that an answer repeats; nothing by default."""

    text: str = ""
    begins: tuple[int, ...] = ()  # where the prompt's tokens begin in the text, if log-probabilities are requested


class CompletionReply(Reply):
    """Writes the answers to one request of completions or chats."""

    def __init__(
        self,
        body: AnswersBody,
        id: str,
        model: str,
        echoes: Sequence[Echo],
        prompt_tokens: int,
        spelling: Spelling | None = None,
        reader: Callable[[], TurnReader] = TurnReader,
    ) -> None:
        """``echoes`` has one entry for each answer; ``reader`` makes a reader; ``spelling`` names tokens in log-probabilities.
        ``prompt_tokens`` is the total of all prompts.
        """
        options, self._chat = body.stream_options or UsageOptions(), isinstance(body, ChatBody)
        self._history, self._usage, self._continuous = body.history, options.include_usage, options.continuous_usage_stats
        kind, prefix = ("chat.completion", "chatcmpl") if self._chat else ("text_completion", "cmpl")
        self._head = {"id": f"{prefix}-{id}", "object": kind, "created": int(time.time()), "model": model}
        self._echoes = echoes
        self._prompt_tokens = prompt_tokens
        self._spelling = spelling
        self._readers = [reader() for _ in echoes]
        self._lengths: dict[int, int] = {}  # characters of each choice so far
        self._ended: list[Completion] = []
        self._num_tokens = 0  # tokens of all choices so far

    def resume(self, delivered: Sequence[Chunk]) -> None:
        for index, chunk in enumerate(delivered):
            self._num_tokens += len(chunk.token_ids)
            if chunk.token_ids:
                self._lengths[index] = len(self._echoes[index].text) + len(chunk.text)
                self._readers[index].take(chunk)

    def whole(self, pieces: Sequence[tuple[int, Chunk]]) -> dict[str, Any]:
        """The answers at once."""
        choices = []
        for index, echo in enumerate(self._echoes):
            answer = joined([chunk for number, chunk in pieces if number == index])
            assert answer.completion is not None, "the last piece brings the completion"
            self._ended.append(answer.completion)
            choices.append(
                {
                    "index": index,
                    **self._text(index, answer),
                    "finish_reason": self._readers[index].finish_reason(answer.completion),
                    "logprobs": self._logprobs(answer, len(echo.text), self._prompt_logprobs(answer, echo)),
                    "cascade": report(answer.completion) | (history(answer) if self._history else {}),
                }
            )
        return {**self._head, "choices": choices, **self._costs()}

    def piece(self, index: int, chunk: Chunk) -> bytes:
        self._num_tokens += len(chunk.token_ids)
        echo, opening = self._echoes[index], b""
        if index not in self._lengths:
            opening = self._opening(index, chunk)
        offset = self._lengths.setdefault(index, len(echo.text))
        self._lengths[index] += len(chunk.text)
        if chunk.completion is not None:
            self._ended.append(chunk.completion)
        return opening + self._piece(index, chunk, offset)

    def end(self) -> bytes:
        return (self._event([], **self._costs()) if self._usage else b"") + DONE

    def failed(self, error: CascadeError) -> bytes:
        return event(error_body(error))

    def _text(self, index: int, answer: Chunk) -> dict[str, Any]:
        turn = self._readers[index].take(answer)
        if not self._chat:
            return {"text": self._echoes[index].text + turn.content}
        calls = {"tool_calls": [call.body for call in turn.calls]} if turn.calls else {}
        content = turn.content or (None if turn.calls else "")
        return {"message": {"role": "assistant", "content": content, **turn.reasoning, **calls}}

    def _opening(self, index: int, first: Chunk) -> bytes:
        if self._chat:
            content = "" if self._readers[index].plain else None
            return self._choice(index, {"delta": {"role": "assistant", "content": content}})
        echo = self._echoes[index]
        return self._choice(index, {"text": echo.text}, logprobs=self._prompt_logprobs(first, echo)) if echo.text else b""

    def _piece(self, index: int, chunk: Chunk, offset: int) -> bytes:
        """The event of a piece of a choice, ``offset`` characters after its beginning; empty if the piece adds nothing."""
        reader, end = self._readers[index], chunk.completion
        delta = reader.take(chunk)
        if not (delta or end or self._history or self._spelling or chunk.seed is not None):
            return b""
        extra = history(chunk) if self._history else {}
        if end is not None:
            extra |= report(end)
        if chunk.seed is not None:
            extra["seed"] = chunk.seed
        content = {"content": delta.content} if delta.content or reader.plain else {}
        calls = {"tool_calls": [call.streamed for call in delta.calls]} if delta.calls else {}
        text = {"delta": {**delta.reasoning, **content, **calls}} if self._chat else {"text": delta.content}
        reason = None if end is None else reader.finish_reason(end)
        return self._choice(index, text, reason, self._logprobs(chunk, offset), extra)

    def _choice(
        self,
        index: int,
        text: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, **text, "finish_reason": finish_reason, "logprobs": logprobs}
        so_far = {"usage": counts(self._prompt_tokens, self._num_tokens)} if self._continuous else {}
        return self._event([choice | ({"cascade": extra} if extra else {})], **so_far)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = {"object": "chat.completion.chunk"} if self._chat else {}
        unknown = {"usage": None} if self._usage else {}  # clients expect this before the last event
        return event({**self._head, **kind, "choices": choices, **unknown, **more})

    def _costs(self) -> dict[str, Any]:
        return {"usage": usage(self._ended, self._readers), **draft_metrics(self._ended)}

    def _logprobs(self, chunk: Chunk, offset: int, before: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Log-probabilities of a piece, after those ``before`` of an echoed prompt."""
        if (spelling := self._spelling) is None:
            return None
        if self._chat:
            return chat_logprobs(chunk, spelling, offset)
        logprobs = text_logprobs(chunk.token_ids, chunk.logprobs, _begins(chunk, offset), spelling)
        return logprobs if before is None else {key: before[key] + logprobs[key] for key in before}

    def _prompt_logprobs(self, first: Chunk, echo: Echo) -> dict[str, Any] | None:
        """Log-probabilities of the prompt, which come with the ``first`` piece if requested; the first token has none."""
        prompt, spelling = first.prompt, self._spelling
        if not prompt or spelling is None:
            return None
        return text_logprobs([token.id for token in prompt], prompt, echo.begins, spelling)


def error_body(error: CascadeError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    param = getattr(error, "param", None)
    return {"error": {"message": str(error), "type": error.type, "param": param, "code": error.code}}


def usage(completions: Sequence[Completion], readers: Sequence[TurnReader]) -> dict[str, Any]:
    """Numbers of tokens; a prompt with several answers counts once. Thoughts are counted if the ``readers`` separate them."""
    prompts = {c.index: c.stats for c in completions}.values()
    prompt, output = sum(stats.prompt_tokens for stats in prompts), sum(c.stats.completion_tokens for c in completions)
    thoughts = [number for reader in readers if (number := reader.num_thought_tokens) is not None]
    return {
        **counts(prompt, output),
        "prompt_tokens_details": {"cached_tokens": sum(stats.cached_tokens for stats in prompts)},
        **({"completion_tokens_details": {"reasoning_tokens": sum(thoughts)}} if thoughts else {}),
    }


def counts(prompt: int, output: int) -> dict[str, int]:
    """Numbers of tokens of prompts and answers."""
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def draft_metrics(completions: Sequence[Completion]) -> dict[str, Any]:
    """vLLM's summary of guesses at the full tier; empty if there are several answers or no guess was scored."""
    edge = completions[0].stats.drafted
    if len(completions) > 1 or not edge.passes:
        return {}
    metrics = {
        "mean_acceptance_length": 1 + edge.accepted / edge.passes,
        "draft_acceptance_rate": edge.accepted / edge.proposed,
        "num_spec_steps": edge.passes,
        "num_draft_tokens": edge.proposed,
        "num_accepted_tokens": edge.accepted,
    }
    return {"metrics": {"speculative_decoding": metrics}}


def report(completion: Completion) -> dict[str, Any]:
    """Statistics of an answer: its seed, and every edge between two tiers."""
    stats = completion.stats
    edges = [asdict(edge) | {"mean_accepted_len": edge.mean_accepted_len} for edge in stats.edges]
    return {"seed": completion.seed, "edges": edges, "first_token_s": stats.first_token_s, "undrafted": stats.undrafted}


def history(chunk: Chunk) -> dict[str, Any]:
    """For each token its id, the characters that are complete with it, and its origin (`cascade.messages.origin`)."""
    return {"token_ids": list(chunk.token_ids), "ends": list(chunk.ends), "origins": list(chunk.origins)}


def chat_logprobs(chunk: Chunk, spelling: Spelling, offset: int) -> dict[str, Any]:
    """Log-probabilities in the form of chat completions; the piece begins at ``offset`` of the answer's text."""
    stripped = offset == 0 and not chunk.text.startswith(" ")  # some decoders strip a leading space

    def named(id: int, logprob: float, begin: int) -> dict[str, Any]:
        spelled = spelling.bytes(id)
        if begin == 0 and stripped:
            spelled = spelled.removeprefix(b" ")
        return {"token": spelling.name(id), "logprob": logprob, "bytes": list(spelled)}

    return {
        "content": [
            named(id, own.logprob, begin) | {"top_logprobs": [named(*top, begin) for top in own.top]}
            for id, own, begin in zip(chunk.token_ids, chunk.logprobs, _begins(chunk, offset), strict=True)
        ]
    }


def text_logprobs(
    ids: Sequence[int], logprobs: Sequence[Logprobs | PromptToken], begins: Sequence[int], spelling: Spelling
) -> dict[str, Any]:
    """Log-probabilities in the form of completions, with the positions in the text where tokens begin."""
    name = spelling.name
    return {
        "tokens": [name(id) for id in ids],
        "token_logprobs": [own.logprob for own in logprobs],
        "top_logprobs": [None if own.logprob is None else {name(id): value for id, value in own.top} for own in logprobs],
        "text_offset": list(begins),
    }


def _begins(chunk: Chunk, offset: int) -> list[int]:
    return [offset + begin for begin in (0, *chunk.ends)[: len(chunk.ends)]]
