"""Chat templates of models, tokenizers with their special tokens, and conversations for tests."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATES = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
_SPECIAL = re.compile(
    r"<[|｜][^<>|｜ ]+[|｜]>|<(?:start|end)_of_\w+>|</?s>|\[/?[A-Z_]+\]|<bos>|<\|\w+>|<\w+\|>"
)
_NAMED = {"bos_token": "<bos>", "eos_token": "</s>", "pad_token": "<|pad|>"}
_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")

MISTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (first if first and loop.last else '') + message.content + '[/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
"""The template of Mistral's first instruct models, written after its documentation."""

ASKED = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "  Hi, <b>who</b> are you? "},
    {"role": "assistant", "content": "A model — with\n\nlines."},
    {"role": "user", "content": "Sure? [x]"},
    {"role": "assistant", "content": " Yes."},
]
REASONED = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2", "reasoning_content": "Add them."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "Add\nthem again."},
]
CALLED = [
    {"role": "user", "content": "Weather in Bern and Oslo?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
        ],
    },
    {"role": "tool", "name": "weather", "content": '{"sky": "clear"}'},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"days": 1}}}
        ],
    },
    {"role": "tool", "name": "weather", "content": ""},
    {"role": "assistant", "content": "Clear."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye."},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the “sky”.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Place"}},
                "required": ["city"],
            },
        },
    }
]


def template(name):
    """Return the text of a template by the name of its file in trl, or of Mistral's."""
    return MISTRAL if name == "mistral" else (TEMPLATES / f"{name}.jinja").read_text("utf-8")


def with_json_arguments(messages):
    """Return messages whose calls have their arguments as JSON."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


def write_tokenizer(folder, text=None):
    """Write a tokenizer of bytes with the special tokens that stand in a template."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted({*_SPECIAL.findall(text or ""), *_NAMED.values()})
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token) for token in _PLAIN if text and token in text])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {**_NAMED, "tokenizer_class": "PreTrainedTokenizerFast"}
    if text is not None:
        settings["chat_template"] = text
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
