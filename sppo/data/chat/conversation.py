"""A conversation as chat templates read it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which reasoning stands in data, the standard one first."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages in the form of transformers, and what is trained on of them."""

    messages: tuple[dict[str, Any], ...]
    """Mappings with ``role`` and ``content``, or with ``tool_calls`` or ``reasoning_content``."""
    _: KW_ONLY
    tools: list[Any] | None = None
    """JSON schemas of the functions that the assistant may call; None without tools."""
    template_values: dict[str, Any] = field(default_factory=dict)
    """Further values of the template, such as ``enable_thinking``."""
    prompt_messages: int | None = None
    """Number of leading messages that are the prompt; None if no prompt is set apart."""
    untrained: frozenset[int] = frozenset()
    """Indices of messages of the assistant that are not to be trained on, and of any others."""

    def answers(self, *, after_prompt: bool = False) -> tuple[int, ...]:
        """Return the indices of the messages of the assistant, all or those after the prompt."""
        first = (self.prompt_messages or 0) if after_prompt else 0
        numbered = enumerate(self.messages)
        return tuple(i for i, one in numbered if i >= first and one["role"] == "assistant")


def template_messages(messages: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """Return messages as transformers gives them to templates.

    Keys without a value are left out, and reasoning stands under all the keys that templates read.
    """
    given = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None}
        reasoning = next((kept[key] for key in REASONING if key in kept), None)
        if reasoning is not None:
            kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
        given.append(kept)
    return given
