"""Conversations of rows: messages in their usual forms, checked, in the form of chat templates.

Forms are messages (role and content, or from and value), messages of a prompt and of a completion,
and an instruction with its output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sppo.data.chat.conversation import REASONING, Chat
from sppo.quoting import one_line, quoted

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function_call": "assistant",
    **{role: role for role in _ROLES},
}
"""Roles by the names that stand under ``from``."""
_FLAGS = ("train", "loss", "weight")
"""Keys of a message that tell whether it is trained on."""
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize")


def chat_of(values: Mapping[str, Any], source: str) -> Chat:
    """Return the conversation of a row.

    Args:
        values: Values of the row by column.
        source: File and row, for messages.

    Raises:
        ValueError: The row breaks a rule of conversations.
    """
    prompt_messages = None
    if "messages" in values:
        listed = _list(values["messages"], "messages", source)
    elif "prompt" in values:
        prompt = _list(values["prompt"], "prompt", source)
        listed = [*prompt, *_list(values["completion"], "completion", source)]
        prompt_messages = len(prompt)
    else:
        listed = _instruction(values, source)
        prompt_messages = len(listed) - 1
    if "system" in values and values["system"] != "":
        listed = [{"role": "system", "content": values["system"]}, *listed]
        prompt_messages = None if prompt_messages is None else prompt_messages + 1
    named = [(f"{source}: message {number}", one) for number, one in enumerate(listed, start=1)]
    messages = tuple(_message(message, where) for where, message in named)
    if not messages:
        raise ValueError(f"{source}: no messages; remove the row")
    if messages[0]["role"] == "assistant":
        raise ValueError(
            f"{source}: the first message is the assistant's; begin with one of the user or system"
        )
    return Chat(
        messages,
        tools=_tools(values.get("tools"), source),
        template_values=_template_values(values.get("chat_template_kwargs"), source),
        prompt_messages=prompt_messages,
        untrained=frozenset(
            index for index, (where, message) in enumerate(named) if not _is_trained(message, where)
        ),
    )


def _list(value: Any, name: str, source: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(
            f"{source}: {name} is {quoted(value)}, not a list of messages such as"
            ' {"role": "user", "content": "..."}'
        )
    return value


def _instruction(values: Mapping[str, Any], source: str) -> list[Any]:
    """Return the messages of an instruction, its input, its output, and the turns before."""
    strings = [values["instruction"], values.get("input", ""), values["output"]]
    history = values.get("history", [])
    pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    if not pairs or not all(isinstance(text, str) for text in strings):
        raise ValueError(
            f"{source}: instruction, input and output are strings, and history is a list of"
            " [instruction, output]; correct the row"
        )
    instruction, further, output = strings
    question = f"{instruction}\n{further}" if further else instruction
    return [
        {"role": role, "content": content}
        for pair in (*history, (question, output))
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]


def _message(message: Any, source: str) -> dict[str, Any]:
    """Return a message in the form of chat templates.

    Raises:
        ValueError: Its role is unknown, or it has no text, or more than text.
    """
    if not isinstance(message, dict):
        raise ValueError(f'{source} is {quoted(message)}, not {{"role": ..., "content": ...}}')
    kept = {key: value for key, value in message.items() if key not in _FLAGS}
    speaker = kept.pop("from", None)
    if speaker is not None:
        return _said(kept, speaker, source)
    role = kept.get("role")
    if role not in _ROLES:
        raise ValueError(f"{source}: role {quoted(role)}; roles are {', '.join(_ROLES)}")
    calls = kept.get("tool_calls")
    if calls:
        kept["tool_calls"] = _calls(calls, source)
    speaks_otherwise = bool(calls) or any(kept.get(key) is not None for key in REASONING)
    kept["content"] = _content(kept.get("content"), source, may_lack=speaks_otherwise)
    return kept


def _said(kept: dict[str, Any], speaker: Any, source: str) -> dict[str, Any]:
    """Return the message of one that has the keys from and value."""
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise ValueError(f"{source}: from {quoted(speaker)}; write {', '.join(_SPEAKERS)}")
    value = kept.pop("value", None)
    if speaker == "function_call":
        return {**kept, "role": role, "content": None, "tool_calls": _calls(value, source)}
    return {**kept, "role": role, "content": _content(value, source)}


def _content(content: Any, source: str, *, may_lack: bool = False) -> str | None:
    """Return the text of a message, of which parts are joined."""
    if isinstance(content, list):
        return "".join(_part(part, source) for part in content)
    if content is None and may_lack:
        return None
    if not isinstance(content, str):
        raise ValueError(f"{source}: its content is {quoted(content)}, not text")
    return content


def _part(part: Any, source: str) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise ValueError(
            f"{source}: a part of type {one_line(kind)}; models here read text alone: remove the"
            " row, or write the part as text"
        )
    return text


def _calls(calls: Any, source: str) -> list[dict[str, Any]]:
    """Return calls of tools, with their arguments as mappings."""
    calls = _parsed(calls, f"{source}: its tool_calls")
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{source}: tool call {quoted(call)}; write"
                ' {"function": {"name": "...", "arguments": {...}}}'
            )
    return [_with_mapping(call, source) for call in calls]


def _with_mapping(call: dict[str, Any], source: str) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_mapping(call["function"], source)}
    if "arguments" not in call:
        return call
    where = f"{source}: arguments of {one_line(call['name'])}"
    arguments = _parsed(call["arguments"], where)
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: {quoted(arguments)}, not an object of values by name")
    return {**call, "arguments": arguments}


def _tools(tools: Any, source: str) -> list[Any] | None:
    tools = _parsed(tools, f"{source}: tools") if tools else None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ValueError(f"{source}: tools is {quoted(tools)}, not a list of JSON schemas")
    return tools


def _template_values(values: Any, source: str) -> dict[str, Any]:
    values = {} if values is None else _parsed(values, f"{source}: chat_template_kwargs")
    if not isinstance(values, dict) or any(name in values for name in _RESERVED):
        raise ValueError(
            f"{source}: chat_template_kwargs {quoted(values)}: not an object of further values of"
            " the template, such as enable_thinking"
        )
    return values


def _parsed(value: Any, where: str) -> Any:
    """Return a value, which may stand in a string as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: {quoted(value)} is not JSON; correct or remove it") from None


def _is_trained(message: Any, source: str) -> bool:
    """Return whether the keys of a message allow to train on it."""
    flags = [message[key] for key in _FLAGS if message.get(key) is not None]
    for flag in flags:
        if not isinstance(flag, (bool, int, float)) or flag not in (0, 1):
            raise ValueError(
                f"{source}: its weight is {quoted(flag)}; weights of labels are not supported:"
                " write 1 or 0, or train: true or false"
            )
    return all(flags)
