"""Which special tokens end the answers of a chat template, so that a model learns to stop."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sppo.data.chat.spans import SpanError
from sppo.quoting import quoted

Rendered = tuple[str, tuple[tuple[int, int], ...]]
"""Text of messages, and the spans of the template's marks in it."""
_QUESTION = {"role": "user", "content": "Q"}
_ANSWER = {"role": "assistant", "content": "sppo"}


def answer_stops(
    render: Callable[[tuple[dict[str, Any], ...]], Rendered], special_tokens: re.Pattern[str]
) -> tuple[str, ...]:
    """Return the special tokens that follow an answer whether or not messages follow it.

    If the tokens differ at once, that of the end of a conversation alone. Empty if the template
    refuses an answer to a question, or leaves it out.

    Args:
        render: Renders messages with the template; raises ValueError if it refuses them.
        special_tokens: Pattern that finds the special tokens of the tokenizer.

    Raises:
        SpanError: No special token follows, or the last stands outside of the template's marks.
    """
    found = []
    for messages in ((_QUESTION, _ANSWER), (_QUESTION, _ANSWER, _QUESTION, _ANSWER)):
        try:
            text, marks = render(messages)
        except ValueError:
            break
        end = text.find(_ANSWER["content"]) + len(_ANSWER["content"])
        if end >= len(_ANSWER["content"]):
            found.append((text[end:], list(special_tokens.finditer(text, end)), marks))
    if not found:
        return ()
    rest, tokens, marks = found[0]
    if not tokens:
        written = quoted(rest.strip()) if rest.strip() else "nothing"
        raise SpanError(
            f"{written} ends the messages of the assistant, which is no special token of the"
            " tokenizer, so the model would not learn to stop; give a --chat-template that ends"
            " them with one, such as eos_token"
        )
    pairs = enumerate(zip(tokens, found[-1][1], strict=False))
    number = next((i for i, (one, other) in pairs if one[0] != other[0]), len(tokens))
    stops = tokens[: max(1, number)]
    last = stops[-1]
    if marks and not any(start <= last.start() and last.end() <= end for start, end in marks):
        raise SpanError(
            f"{last[0]} ends the messages of the assistant, and stands outside of the template's"
            " {% generation %} marks, so the model would not learn to stop; move it inside"
        )
    return tuple(stop[0] for stop in stops)
