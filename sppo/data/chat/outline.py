"""Outlines of conversations: short renderings by which each text is found in the whole one.

In the outline of a conversation each stretch of a message's text is replaced by a short name. White
space around it stays, and so do the texts that the template looks for, such as ``</think>``, so
that the template treats both alike. The rendering of the outline then is the rendering of the
conversation with names in place of texts. :meth:`Outline.place` verifies this to the last
character, whatever the texts hold, in time proportional to their length.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_NAME = re.compile(r"sppotext([0-9]+)x")
_CORE = re.compile(r"\S(?:.*\S)?", re.DOTALL)
_TEXT_KEYS = ("content", "reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of text of a message."""

    message: int
    """Index of the message."""
    text: str
    is_content: bool
    """Whether it is of the content, instead of reasoning or calls."""
    after: str
    """What follows it that has no name: white space, and texts that the template looks for."""


class OutlinedMessages:
    """Messages with names in place of their texts.

    Args:
        messages: Messages as templates read them.
        kept: Texts that a template looks for in messages, which are not replaced.
        trimmed: Leave out white space around texts.
    """

    def __init__(
        self, messages: Sequence[dict[str, Any]], kept: Sequence[str], *, trimmed: bool = False
    ) -> None:
        longest_first = sorted(kept, key=len, reverse=True)
        self._kept = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._trimmed = trimmed
        self.stretches: list[Stretch] = []
        """The texts by the number in their names."""
        self.messages = [self._message(number, message) for number, message in enumerate(messages)]
        """The messages with names."""

    def _message(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        made = dict(message)
        for key in _TEXT_KEYS:
            if key in made:
                made[key] = self._value(number, key, made[key])
        if isinstance(made.get("tool_calls"), list):
            made["tool_calls"] = [self._call(number, call) for call in made["tool_calls"]]
        if message["role"] == "tool" and not str(made.get("content")).strip():
            made["content"] = self._name(Stretch(number, "", True, ""))  # tells answers apart
        return made

    def _call(self, number: int, call: Any) -> Any:
        """Return a call of a tool with names in place of the texts of its arguments."""
        if not isinstance(call, dict):
            return call
        made = dict(call)
        if "function" in made:
            made["function"] = self._call(number, made["function"])
        if "arguments" in made:
            made["arguments"] = self._value(number, "arguments", made["arguments"])
        return made

    def _value(self, number: int, key: str, value: Any) -> Any:
        """Return the value under a key of a message with names in place of the texts in it.

        Keys of mappings and types of parts stay.
        """
        if isinstance(value, dict):
            return {
                inner: item if inner == "type" else self._value(number, key, item)
                for inner, item in value.items()
            }
        if isinstance(value, list):
            return [self._value(number, key, item) for item in value]
        return self._text(number, key, value) if isinstance(value, str) else value

    def _text(self, number: int, key: str, text: str) -> str:
        """Return a text with a name for each stretch of it, and what is between them."""
        if self._trimmed:
            text = text.strip()
        kept = [(0, 0), *(found.span() for found in self._kept.finditer(text)), (len(text), 0)]
        cores = (_CORE.search(text, end, start) for (_, end), (start, _) in pairwise(kept))
        spans = [core.span() for core in cores if core is not None]
        if not spans:
            return text
        parts = [text[: spans[0][0]]]
        for (start, end), (following, _) in pairwise([*spans, (len(text), 0)]):
            after = text[end:following]
            parts.append(self._name(Stretch(number, text[start:end], key == "content", after)))
            parts.append(after)
        return "".join(parts)

    def _name(self, stretch: Stretch) -> str:
        self.stretches.append(stretch)
        return f"sppotext{len(self.stretches) - 1}x"


@dataclass(frozen=True, slots=True)
class Anchor:
    """Place of one text of a conversation in the outline of its rendering."""

    start: int
    end: int
    stretch: Stretch


class Outline:
    """Rendering of outlined messages.

    Args:
        text: The rendering.
        outlined_messages: The messages that were rendered.
    """

    def __init__(self, text: str, outlined_messages: OutlinedMessages) -> None:
        known = outlined_messages.stretches
        self.text = text
        self.anchors = [
            Anchor(found.start(), found.end(), known[int(found[1])])
            for found in _NAME.finditer(text)
            if int(found[1]) < len(known)
        ]
        """Texts in the order in which they are rendered."""

    def place(self, rendered: str) -> Places:
        """Return where the characters of the outline stand in the rendering of the messages.

        Raises:
            DifferentText: The rendering is not the outline with texts in place of names.
        """
        ends = [0]
        position = before = 0
        for anchor in self.anchors:
            literal = self.text[before : anchor.start]
            position += len(literal)
            spelling = next(
                (
                    spelling
                    for spelling in spellings(anchor.stretch.text)
                    if rendered.startswith(spelling, position)
                ),
                None,
            )
            if spelling is None or not rendered.startswith(literal, position - len(literal)):
                raise DifferentText(anchor.stretch.message)
            position += len(spelling)
            before = anchor.end
            ends.append(position)
        if rendered[position:] != self.text[before:]:
            raise DifferentText(self.anchors[-1].stretch.message if self.anchors else 0)
        return Places([0, *(anchor.end for anchor in self.anchors)], ends)


class DifferentText(Exception):
    """A rendering differs from the outline at the text of a message.

    Args:
        message: Index of the message.
    """

    def __init__(self, message: int) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True)
class Places:
    """Map from positions in an outline, outside of its names, to those in the whole rendering."""

    outline_ends: list[int]
    ends: list[int]

    def __call__(self, position: int) -> int:
        """Return the position in the whole rendering."""
        number = bisect_right(self.outline_ends, position) - 1
        return self.ends[number] + position - self.outline_ends[number]


def spellings(text: str) -> list[str]:
    """Return the ways in which templates write a text: inside of JSON, and as it is."""
    inside = [json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (True, False)]
    return [*inside, text]
