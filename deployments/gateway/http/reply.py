"""Completions and chat completions in OpenAI's form, whole and in pieces."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from cascade.answer import Chunk, Completion, PromptToken
from cascade.messages import Logprobs
from deployments.gateway.admission.status import Refusal
from deployments.gateway.chat.reader import TurnReader, ending, finish_reason, read
from deployments.gateway.http.events import event

Name = Callable[[int], str]  # the text of a token alone, which may be half a character
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Echo:
    """What an answer begins with: the prompt, if it is to be repeated."""

    text: str = ""
    begins: tuple[int, ...] = ()  # of the prompt's tokens in the text, if log-probabilities are asked for


@dataclass(frozen=True, slots=True)
class Form:
    """What all pieces of an answer have in common."""

    kind: Literal["chat", "text"]
    id: str
    model: str
    history: bool = False
    usage: bool = False  # after the last piece
    prompt_tokens: int | None = None  # of all prompts, if each piece tells the tokens so far
    name: Name | None = None  # of a token, if log-probabilities are asked for
    reader: Callable[[], TurnReader] | None = None  # of each answer, if it may call tools or think
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, streamed: bool) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.kind == "chat" and streamed else "chat.completion"
        head = {"id": self.id, "object": name if self.kind == "chat" else "text_completion"}
        usage = {"usage": None} if streamed and self.usage else {}
        return {**head, "created": self.created, "model": self.model, **usage}


class CompletionReply:
    """The answers to one request, after what the client has of each choice, which is ``known``."""

    def __init__(self, form: Form, echoes: Sequence[Echo], known: Sequence[Chunk] = ()) -> None:
        self._form = form
        self._echoes = echoes
        self._readers = [None if form.reader is None else form.reader() for _ in echoes]
        self._lengths: dict[int, int] = {}  # characters of each choice so far
        self._ended: list[Completion] = []
        self._num_tokens = sum(len(chunk.token_ids) for chunk in known)
        for index, chunk in enumerate(known):
            if chunk.token_ids:
                self._lengths[index] = len(echoes[index].text) + len(chunk.text)
                if (reader := self._readers[index]) is not None:
                    reader.take(chunk)

    def whole(self, pieces: Sequence[tuple[int, Chunk]]) -> dict[str, Any]:
        """The answers at once."""
        form = self._form
        answers: list[list[Chunk]] = [[] for _ in self._echoes]
        for index, chunk in pieces:
            answers[index].append(chunk)
        choices = []
        for index, (chunks, echo, reader) in enumerate(zip(answers, self._echoes, self._readers, strict=True)):
            completion = ending(chunks)
            self._ended.append(completion)
            if form.kind == "chat":
                why, message = _message(reader, chunks, completion)
                body: dict[str, Any] = {"message": message, "finish_reason": why}
            else:
                body = {"text": echo.text + completion.text, "finish_reason": completion.finish_reason}
            logprobs = self._logprobs(chunks, len(echo.text))
            if logprobs is not None and (before := self._prompt_logprobs(chunks[0], echo)) is not None:
                logprobs = {key: before[key] + logprobs[key] for key in before}
            extra = report(completion) | (history(chunks) if form.history else {})
            choices.append({"index": index, **body, "logprobs": logprobs, "cascade": extra})
        return form.head(False) | {"choices": choices} | self._costs()

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """The next piece of a choice."""
        echo, said = self._echoes[index], []
        if index not in self._lengths:
            said.append(self._opening(index, chunk))
        offset = self._lengths.setdefault(index, len(echo.text))
        self._lengths[index] += len(chunk.text)
        self._num_tokens += len(chunk.token_ids)
        if chunk.completion is not None:
            self._ended.append(chunk.completion)
        said.append(self._piece(index, chunk, offset))
        told = [part for part in said if part is not None]
        if (prompt_tokens := self._form.prompt_tokens) is not None:
            told = [part | {"usage": counted(prompt_tokens, self._num_tokens)} for part in told]
        return b"".join(map(event, told))

    def end(self) -> bytes:
        """What comes after the last piece."""
        closing = self._form.head(True) | {"choices": []} | self._costs()
        return (event(closing) if self._form.usage else b"") + DONE

    def failed(self, refused: Refusal) -> bytes:
        """What comes in place of the end."""
        return event(refused.body)

    def _opening(self, index: int, first: Chunk) -> dict[str, Any] | None:
        """What comes before the ``first`` piece of a choice."""
        if self._form.kind == "chat":
            return self._choice(index, {"delta": {"role": "assistant", "content": None if self._form.reader else ""}})
        echo = self._echoes[index]
        if not echo.text:
            return None
        return self._choice(index, {"text": echo.text}, logprobs=self._prompt_logprobs(first, echo))

    def _piece(self, index: int, chunk: Chunk, offset: int) -> dict[str, Any] | None:
        """A piece of a choice, ``offset`` characters after its begin; ``None`` if there is nothing to say yet."""
        form, reader, end = self._form, self._readers[index], chunk.completion
        if reader is not None:
            delta = reader.take(chunk)
            text: dict[str, Any] = {"delta": delta.body}
            if not (delta or end or form.history or form.name or chunk.lanes or chunk.seed is not None):
                return None
        else:
            text = {"delta": {"content": chunk.text}} if form.kind == "chat" else {"text": chunk.text}
        extra = history([chunk]) if form.history else {}
        if end is not None:
            extra |= report(end)
        if chunk.lanes:
            extra["lanes"] = [asdict(lane) for lane in chunk.lanes]
        if chunk.seed is not None:
            extra["seed"] = chunk.seed
        why = None if end is None else finish_reason(end, reader)
        return self._choice(index, text, why, self._logprobs([chunk], offset), extra)

    def _choice(
        self,
        index: int,
        text: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **text, "finish_reason": finish_reason, "logprobs": logprobs}
        return self._form.head(True) | {"choices": [choice | ({"cascade": extra} if extra else {})]}

    def _costs(self) -> dict[str, Any]:
        """What all answers took, once they have ended."""
        return {"usage": usage(self._ended, self._readers), **drafted(self._ended)}

    def _logprobs(self, chunks: Sequence[Chunk], offset: int) -> dict[str, Any] | None:
        name = self._form.name
        if name is None:
            return None
        return chat_logprobs(chunks, name) if self._form.kind == "chat" else text_logprobs(chunks, name, offset)

    def _prompt_logprobs(self, first: Chunk, echo: Echo) -> dict[str, Any] | None:
        """Those of the prompt, which come with the ``first`` piece if they were asked for."""
        name = self._form.name
        return prompt_logprobs(first.prompt, echo.begins, name) if first.prompt and name is not None else None


def usage(completions: Sequence[Completion], readers: Sequence[TurnReader | None] = ()) -> dict[str, Any]:
    """Tokens; a prompt with several answers counts once. With those of thoughts if the ``readers`` tell them apart."""
    prompts = {c.index: c.stats for c in completions}.values()
    output = sum(c.stats.completion_tokens for c in completions)
    cached = {"prompt_tokens_details": {"cached_tokens": sum(stats.cached_tokens for stats in prompts)}}
    thoughts = [n for reader in readers if reader is not None and (n := reader.num_thought_tokens) is not None]
    details = {"completion_tokens_details": {"reasoning_tokens": sum(thoughts)}} if thoughts else {}
    return counted(sum(stats.prompt_tokens for stats in prompts), output) | cached | details


def counted(prompt: int, output: int) -> dict[str, Any]:
    """So many tokens of prompts and answers."""
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def drafted(completions: Sequence[Completion]) -> dict[str, Any]:
    """How guesses fared at the full tier, as vLLM tells it: of one answer that had any, else nothing."""
    edge = completions[0].stats.drafted
    if len(completions) > 1 or not edge.passes:
        return {}
    at_least = (edge.passes, *edge.accepted_by_position, 0)  # passes that accepted so many guesses
    histogram = {str(number): more - most for number, (more, most) in enumerate(pairwise(at_least)) if more > most}
    told = {
        "mean_acceptance_length": 1 + edge.accepted / edge.passes,
        "draft_acceptance_rate": edge.accepted / edge.proposed,
        "acceptance_histogram": histogram,
        "num_spec_steps": edge.passes,
        "num_accepted_draft_tokens": edge.accepted,
        "num_accepted_tokens": edge.accepted,
        "num_draft_tokens": edge.proposed,
        "num_spec_tokens": len(edge.proposed_by_position),
    }
    return {"metrics": {"speculative_decoding": told}}


def report(completion: Completion) -> dict[str, Any]:
    """What happened: the seed, and every edge between two tiers."""
    edges = [asdict(edge) | {"mean_accepted_len": edge.mean_accepted_len} for edge in completion.stats.edges]
    stats = completion.stats
    said = {"seed": completion.seed, "edges": edges, "first_token_s": stats.first_token_s, "undrafted": stats.undrafted}
    return said | {"rule": stats.rule}


def history(chunks: Iterable[Chunk]) -> dict[str, Any]:
    """Of each token: its id, the characters that are complete with it, and who wrote it (`cascade.messages.origin`)."""
    ids: list[int] = []
    ends: list[int] = []
    origins: list[int] = []
    num_chars = 0
    for chunk in chunks:
        ids += chunk.token_ids
        ends += [num_chars + end for end in chunk.ends]
        origins += chunk.origins
        num_chars += len(chunk.text)
    return {"token_ids": ids, "ends": ends, "origins": origins}


def _message(reader: TurnReader | None, chunks: Sequence[Chunk], completion: Completion) -> tuple[str, dict[str, Any]]:
    """Why a whole answer ended, and what it thinks, says and calls."""
    said, why = read(chunks, completion, reader)
    message: dict[str, Any] = {"role": "assistant", "content": said.whole_content}
    message |= said.reasoning
    if said.calls:
        message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in said.calls.values()]
    return why, message


def chat_logprobs(chunks: Sequence[Chunk], name: Name) -> dict[str, Any]:
    """Log-probabilities as chat completions have them."""
    return {
        "content": [
            _named(name(token), entry.logprob) | {"top_logprobs": [_named(name(id), value) for id, value in entry.top]}
            for token, entry, _ in _entries(chunks)
        ]
    }


def text_logprobs(chunks: Sequence[Chunk], name: Name, offset: int) -> dict[str, Any]:
    """As completions have them; the first chunk's text begins at ``offset`` of the choice's text."""
    entries = _entries(chunks)
    return {
        "tokens": [name(token) for token, _, _ in entries],
        "token_logprobs": [entry.logprob for _, entry, _ in entries],
        "top_logprobs": [{name(id): value for id, value in entry.top} for _, entry, _ in entries],
        "text_offset": [offset + begin for _, _, begin in entries],
    }


def prompt_logprobs(prompt: Sequence[PromptToken], begins: Sequence[int], name: Name) -> dict[str, Any]:
    """The same of an echoed prompt, whose tokens begin at ``begins`` of its text. The first token has no log-probability."""
    return {
        "tokens": [name(token.id) for token in prompt],
        "token_logprobs": [token.logprob for token in prompt],
        "top_logprobs": [None if token.logprob is None else {name(id): value for id, value in token.top} for token in prompt],
        "text_offset": list(begins),
    }


def _entries(chunks: Sequence[Chunk]) -> list[tuple[int, Logprobs, int]]:
    """Token, log-probabilities, and where its characters begin."""
    found: list[tuple[int, Logprobs, int]] = []
    num_chars = 0
    for chunk in chunks:
        begins = (0, *chunk.ends)[: len(chunk.ends)]
        found += [
            (token, entry, num_chars + begin)
            for token, entry, begin in zip(chunk.token_ids, chunk.logprobs, begins, strict=True)
        ]
        num_chars += len(chunk.text)
    return found


def _named(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
