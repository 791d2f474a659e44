"""Models that think out loud: where the thoughts of an answer begin and end."""

import math

from cascade.answer import overlap

OPEN, CLOSE = "<think>", "</think>"
TAIL = 32  # tokens of a prompt's end, in which a tag has room however it is spelled


class ThoughtSplitter:
    """Takes the thoughts out of one answer, which has them once; a later tag is the model's talk of tags.

    ``within``: the prompt has opened them. Blanks stay where they are: thoughts, tags and words joined are the text.
    """

    def __init__(self, within: bool) -> None:
        self._tags = [CLOSE] if within else [OPEN, CLOSE]  # that are still to come
        self._untold = ""  # what may begin a tag
        self._num_told = 0  # characters before it
        self._begin = 0.0 if within else math.inf  # of the thoughts with their tags, in characters of the answer
        self._end = math.inf

    def take(self, text: str, ended: bool) -> tuple[str, str]:
        """What one more piece brings: thoughts, and words."""
        self._untold += text
        thoughts = words = ""
        while self._untold:
            tag = self._tags[0] if self._tags else ""
            at = self._untold.find(tag) if tag else -1
            certain = at if at >= 0 else len(self._untold) - (0 if ended else overlap(self._untold, tag))
            if tag == CLOSE:
                thoughts += self._untold[:certain]
            else:
                words += self._untold[:certain]
            self._advance(certain)
            if at < 0:
                break
            self._pass(tag)
        return thoughts, words

    def holds(self, place: int) -> bool:
        """Whether the character there belongs to the thoughts or their tags; certain once it was taken."""
        return self._begin <= place < self._end

    def _pass(self, tag: str) -> None:
        if tag == OPEN:
            self._begin = self._num_told
        self._advance(len(tag))
        if tag == CLOSE:
            self._end = self._num_told
        del self._tags[0]

    def _advance(self, num_chars: int) -> None:
        self._untold = self._untold[num_chars:]
        self._num_told += num_chars


def opened(text: str) -> bool | None:
    """Whether ``text`` ends within thoughts; ``None`` if it ends after them."""
    opening, closing = text.rfind(OPEN), text.rfind(CLOSE)
    if closing > opening:
        return None
    return opening >= 0


def prompted(text: str) -> bool | None:
    """The same of a prompt, whose end opens or closes the thoughts of the turn that it begins."""
    end = text.rstrip()
    return True if end.endswith(OPEN) else None if end.endswith(CLOSE) else False
