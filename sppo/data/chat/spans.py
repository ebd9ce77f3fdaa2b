"""Which characters of a rendered conversation the assistant writes, without marks in the template.

A message of the assistant spans from where its generation prompt ends to the end of the token that
stops it. Both are read off outlines (:mod:`.outline`): the prompt ends where the rendering of
the messages before it ends, with ``add_generation_prompt``; the message stops with the first
special token after its last text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sppo.data.chat.outline import (
    Anchor,
    DifferentText,
    Outline,
    OutlinedMessages,
    spellings,
)
from sppo.quoting import quoted

_THINKING = re.compile(r"<think>|\[THINK\]|<\|channel>thought")
_EMPTY_THINKING = re.compile(
    r"\s*(?:<think>\s*</think>|\[THINK\]\s*\[/THINK\]|<\|channel>thought\s*<channel\|>)\n*"
)

Render = Callable[[Sequence[dict[str, Any]], bool], str]
"""Function that renders messages, with a generation prompt or without."""


class SpanError(ValueError):
    """Rule by which spans cannot be told; the message goes on after the file and the row."""


@dataclass(frozen=True, slots=True)
class Template:
    """Texts of a template and its tokenizer by which :func:`assistant_spans` finds answers."""

    render: Render
    looks_for: tuple[str, ...]
    """Texts that the template looks for in messages."""
    special_tokens: re.Pattern[str]
    """Pattern that finds the special tokens of the tokenizer."""
    stops: tuple[str, ...]
    """The special tokens that end an answer, mostly one; empty if unknown."""


def assistant_spans(
    template: Template, messages: Sequence[dict[str, Any]], wanted: Sequence[int], text: str
) -> tuple[tuple[int, int], ...]:
    """Return the spans [start, end) in ``text`` of messages of the assistant, in order.

    A block for reasoning that the template inserts by itself is outside, because whoever generates
    supplies it.

    Args:
        template: Template and tokenizer.
        messages: Messages as templates read them.
        wanted: Indices of messages, ascending.
        text: The rendering of the messages, without a generation prompt.

    Raises:
        SpanError: A span cannot be told.
    """
    found = _Spans(template, messages)
    try:
        place = found.outline.place(text)
    except DifferentText as error:
        raise SpanError(
            f"the template changes message {error.message + 1} depending on its text, so trained"
            " text cannot be located; give --chat-template with {% generation %} marks"
        ) from None
    spans = [found.span(number) for number in wanted]
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise SpanError("the template writes messages of the assistant into one another")
    return tuple((place(start), place(end)) for start, end in spans)


class _Spans:
    """Spans of messages in the outline of a conversation."""

    def __init__(self, template: Template, messages: Sequence[dict[str, Any]]) -> None:
        self.template = template
        self.messages = messages
        self.outline = self._outline(messages)
        self._own: dict[int, list[int]] = {}
        for index, anchor in enumerate(self.outline.anchors):
            self._own.setdefault(anchor.stretch.message, []).append(index)
        self._prompts: dict[Any, str] = {}
        """What follows the last text before a message of the assistant, by what stands there."""
        self._stops: dict[tuple[bool, bool], str | None] = {}
        """The token that ends a message with or without calls and content."""

    def _outline(self, messages: Sequence[dict[str, Any]], *, prompt: bool = False) -> Outline:
        named = OutlinedMessages(messages, self.template.looks_for, trimmed=prompt)
        return Outline(self.template.render(named.messages, prompt), named)

    def span(self, number: int) -> tuple[int, int]:
        """Return the span of a message in the outline."""
        own = self._own.get(number, [])
        anchors = self.outline.anchors
        if not self._is_visible(number, own):
            raise SpanError(
                f"the template leaves out the text of message {number + 1} of the assistant; give"
                " another --chat-template, or mark the message with train: false"
            )
        start = self._start(number, own)
        last = max(start, anchors[own[-1]].end if own else 0)
        end = self._end(number, last)
        inside = range(self._first_after(start), self._first_after(end))
        if list(inside) != own:
            raise SpanError(
                f"the template writes text of other messages into message {number + 1}, or its own"
                " elsewhere, so trained text cannot be located; give --chat-template with"
                " {% generation %} marks"
            )
        for call in self.messages[number].get("tool_calls", ()):
            name = str(call.get("function", call).get("name"))
            if name not in self.outline.text[start:end]:
                raise SpanError(
                    f"the template leaves out the call of {quoted(name)} in message {number + 1};"
                    " give a --chat-template with tools, or mark the message with train: false"
                )
        return start, end

    def _is_visible(self, number: int, own: Sequence[int]) -> bool:
        """Return whether a message is rendered with its text.

        Templates may leave out the reasoning of earlier messages, and content beside calls.
        """
        message = self.messages[number]
        if "tool_calls" in message or any(
            self.outline.anchors[index].stretch.is_content for index in own
        ):
            return True
        stretches = OutlinedMessages([message], self.template.looks_for).stretches
        return not any(stretch.is_content for stretch in stretches)

    def _first_after(self, position: int) -> int:
        """Return the index of the first anchor that does not start before a position."""
        return bisect_left(self.outline.anchors, position, key=lambda anchor: anchor.start)

    def _start(self, number: int, own: list[int]) -> int:
        """Return where the generation prompt of a message ends."""
        anchors, text = self.outline.anchors, self.outline.text
        if own:
            previous = own[0] - 1
        else:
            with_text = (one for one in reversed(range(number)) if one in self._own)
            previous = next((self._own[one][-1] for one in with_text), -1)
        earlier = anchors[previous] if previous >= 0 else None
        prompt = self._prompt(number, earlier)
        unnamed = self.messages[0 if earlier is None else earlier.stretch.message + 1 : number]
        thinking = [found.start() for found in _THINKING.finditer(prompt)]
        if any(_THINKING.search(str(one.get("content"))) for one in unnamed):
            thinking = []  # of a message, instead of the template
        header = prompt[: thinking[-1]] if thinking else prompt
        before = self._end_of_text(earlier, header)
        if before is None:
            raise _rewritten(number)
        start = before + len(prompt if text.startswith(prompt, before) else header)
        inserted = _EMPTY_THINKING.match(text, before + len(header))
        if inserted and not _THINKING.search(str(self.messages[number].get("content"))):
            start = max(start, inserted.end())
        return start

    def _end_of_text(self, anchor: Anchor | None, following: str) -> int | None:
        """Return where the text of a message ends whose last stretch is given; None if unknown.

        Args:
            anchor: The stretch, after which unnamed text may follow that the template may strip;
                None for the beginning.
            following: What the template writes after the message.
        """
        end, after = (0, "") if anchor is None else (anchor.end, anchor.stretch.after)
        possible = (end + len(rest) for rest in (*spellings(after), after.rstrip(), ""))
        return next((at for at in possible if self.outline.text.startswith(following, at)), None)

    def _prompt(self, number: int, earlier: Anchor | None) -> str:
        """Return what a generation prompt writes before a message, after the last text there.

        Args:
            number: Index of the message.
            earlier: The last text before it; None if there is none.
        """
        previous = None if earlier is None else earlier.stretch.message
        between = self.messages[previous or 0 : number]
        kind = (previous is None, *((one["role"], "tool_calls" in one) for one in between))
        if kind not in self._prompts:
            if number == 0:
                raise SpanError(
                    "the conversation begins with the assistant, so nothing prompts its first"
                    " message; remove it, or mark it with train: false"
                )
            outline = self._outline(self.messages[:number], prompt=True)
            last = outline.anchors[-1] if outline.anchors else None
            if (None if last is None else last.stretch.message) != previous:
                raise _rewritten(number)
            rest = outline.text[0 if last is None else last.end :]
            self._prompts[kind] = rest if last is None else rest.removeprefix(last.stretch.after)
        return self._prompts[kind]

    def _end(self, number: int, last: int) -> int:
        """Return where the token ends that stops a message whose last text ends at ``last``."""
        anchors, text = self.outline.anchors, self.outline.text
        later = self._first_after(last)
        limit = anchors[later].start if later < len(anchors) else len(text)
        has_calls = "tool_calls" in self.messages[number]
        has_text = any(anchors[index].stretch.is_content for index in self._own.get(number, []))
        if has_calls or not has_text:
            stop = self._stop(number)
            if stop is not None and (position := text.find(stop, last, limit)) >= 0:
                return position + len(stop)
            if not has_calls:
                raise SpanError(
                    f"message {number + 1} of the assistant has no text, and it cannot be told"
                    " where the template ends it; remove it, or mark it with train: false"
                )
        found = self.template.special_tokens.search(text, last, limit)
        if found is None:
            written = text[last:limit].strip()
            raise SpanError(
                f"the template ends message {number + 1} of the assistant"
                + (f" with {quoted(written)}, which holds" if written else ", after which stands")
                + " no special token of the tokenizer, so the model would not learn to stop; give a"
                " --chat-template that ends it with one, such as eos_token"
            )
        end = found.end()
        for expected in self.template.stops[1:] if found[0] in self.template.stops[:1] else ():
            following = self.template.special_tokens.search(text, end, limit)
            end = following.end() if following and following[0] == expected else end
        return end

    def _stop(self, number: int) -> str | None:
        """Return the token that stops a message with calls or without text; None if there is none.

        It is that of answers, else the last special token of a conversation that ends there.
        """
        message = self.messages[number]
        kind = "tool_calls" in message, bool(message.get("content"))
        if kind not in self._stops:
            outline = self._outline(self.messages[: number + 1])
            tail = outline.text[outline.anchors[-1].end if outline.anchors else 0 :]
            tokens = self.template.special_tokens.findall(tail)
            known = [token for token in self.template.stops[-1:] if token in tokens]
            self._stops[kind] = next(iter(known or tokens[-1:]), None)
        return self._stops[kind]


def _rewritten(number: int) -> SpanError:
    return SpanError(
        f"the template rewrites what stands before message {number + 1} when later messages"
        " follow, so trained text cannot be located; give --chat-template with {% generation %}"
        " marks, or --train-on last"
    )
