"""Chat templates: where they stand, and conversations as text with marks on what is trained on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date as Date  # noqa: N812
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sppo.config.json_file import read_json
from sppo.data.chat.conversation import Chat, template_messages
from sppo.data.chat.marked_text import MarkedText
from sppo.data.chat.spans import SpanError, Template, assistant_spans
from sppo.data.chat.stops import Rendered, answer_stops
from sppo.quoting import one_line, quoted
from sppo.text_file import read_text_file

TEMPLATE_FILE = "chat_template.jinja"
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""The template called ``chatml``, without tools and reasoning."""
DEFAULT_DATE = "26 Jul 2024"
"""Day that ``strftime_now`` tells: that of Llama's templates, so that a repeated command gives
equal tokens."""

TrainOn = Literal["assistant", "last", "completion", "all"]
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class ChatTemplate:
    """Template that makes text of conversations."""

    text: str
    name: str
    """Path of its file, or ``chatml``."""
    special_tokens: dict[str, str]
    """Text of ``bos_token``, ``eos_token`` and so on of the tokenizer, by that name."""
    added_tokens: tuple[tuple[str, bool], ...]
    """Text of each added token of the tokenizer, and whether it is special."""
    today: Date
    """Day that ``strftime_now`` tells."""

    @classmethod
    def load(
        cls, tokenizer: Path | str, option: str | None = None, date: str = DEFAULT_DATE
    ) -> ChatTemplate:
        """Return the template of a tokenizer, or another for its tokens.

        Args:
            tokenizer: Path of a ``tokenizer.json``, or of the directory that holds it.
            option: Path of a template, or ``chatml``; None for the tokenizer's own:
                ``chat_template.jinja`` beside it, else ``chat_template`` of
                ``tokenizer_config.json``.
            date: Day that ``strftime_now`` tells, as ``26 Jul 2024`` or ``2024-07-26``.

        Raises:
            ValueError: There is no template, it is none of jinja2, a file cannot be read, or the
                date is none.
        """
        path = Path(tokenizer)
        folder = path if path.is_dir() else path.parent
        file = path / "tokenizer.json" if path.is_dir() else path
        settings = _settings(folder / "tokenizer_config.json")
        text, name = _find(folder, settings, option, tokenizer=path)
        _check_syntax(text, name)
        return cls(
            text=text,
            name=name,
            special_tokens=_special_tokens(folder, settings),
            added_tokens=tuple(
                (str(token.get("content")), bool(token.get("special")))
                for token in _settings(file).get("added_tokens") or ()
                if isinstance(token, dict) and token.get("content")
            ),
            today=_day(date),
        )

    @property
    def sha256(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def method(self) -> Literal["marked", "turns", "prefixes"]:
        """Method that finds the messages of the assistant.

        ``marked``: by ``{% generation %}`` marks. ``turns``: after the generation prompt.
        ``prefixes``: after the messages before, for templates without a generation prompt.
        """
        from sppo.data.chat.rendering import has_marks

        if has_marks(self.text):
            return "marked"
        asked = Chat(({"role": "user", "content": "Q"},))
        try:
            without, prompted = (
                self._render(asked, asked.messages, "", add_generation_prompt=prompt)[0]
                for prompt in (False, True)
            )
        except ValueError:  # the template wants other messages
            return "turns"
        return "prefixes" if without == prompted else "turns"

    def marked(
        self, chat: Chat, train_on: TrainOn = "assistant", source: str = "chat"
    ) -> MarkedText:
        """Return the text of a conversation, and the spans of it that are trained on.

        Args:
            chat: Conversation.
            train_on: ``assistant``: each message of the assistant, with the token that ends it;
                ``last``: the last of them; ``completion``: what follows the prompt; ``all``.
            source: File and row, for messages.

        Raises:
            ValueError: The template refuses the conversation, or what is trained on cannot be told.
        """
        text, marks = self._render(chat, chat.messages, source)
        if train_on == "all":
            return MarkedText(text, None)
        answers = chat.answers(after_prompt=train_on == "completion")
        last = answers[-1:] if train_on == "last" else answers
        wanted = tuple(number for number in last if number not in chat.untrained)
        if train_on == "completion" and wanted == answers:
            prompt = self._prompt(chat, source)
            if not text.startswith(prompt):
                raise ValueError(
                    f"{source}: the template writes the prompt otherwise when the completion"
                    " follows, so the completion cannot be located; use --train-on assistant"
                )
            return MarkedText(text, ((len(prompt), len(text)),) if len(text) > len(prompt) else ())
        stops = self.stops
        if self.method == "marked":
            return MarkedText(text, self._chosen(marks, chat, wanted, source))
        from sppo.data.chat.rendering import looks_for

        template = Template(
            lambda messages, prompt: self._render(
                chat, messages, source, add_generation_prompt=prompt
            )[0],
            looks_for(self.text),
            self._special_tokens,
            stops,
        )
        messages = template_messages(chat.messages)
        try:
            return MarkedText(text, assistant_spans(template, messages, wanted, text))
        except SpanError as error:
            raise ValueError(f"{source}: {error}") from None

    def _chosen(
        self, marks: Sequence[tuple[int, int]], chat: Chat, wanted: Sequence[int], source: str
    ) -> tuple[tuple[int, int], ...]:
        """Return the marks of the wanted messages."""
        joined: list[tuple[int, int]] = []
        for start, end in marks:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            elif start < end:
                joined.append((start, end))
        written = chat.answers()
        if wanted == written:
            return tuple(joined)
        if len(joined) != len(written):
            raise ValueError(
                f"{source}: the template marks {len(joined)} spans for {len(written)} messages of"
                " the assistant, so it cannot be told which are those to train on; train on all of"
                " them, or give a --chat-template that marks each message once"
            )
        return tuple(joined[written.index(number)] for number in wanted)

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        """Pattern that finds the special tokens by which a message may end."""
        from sppo.data.chat.rendering import looks_for

        named = self.special_tokens.values()
        special = {text for text, special in self.added_tokens if special or text in named}
        longest_first = sorted(special.difference(looks_for(self.text)), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """The special tokens that end an answer, mostly one; empty if the template wants others.

        Raises:
            ValueError: No special token does, or they stand outside of the marks of the template.
        """

        def rendered(messages: tuple[dict[str, Any], ...]) -> Rendered:
            return self._render(Chat(messages), messages, "")

        try:
            return answer_stops(rendered, self._special_tokens)
        except SpanError as error:
            raise ValueError(f"{one_line(self.name)}: {error}") from None

    def question(self, text: str) -> str:
        """Return the text of one message of a user, up to where the assistant answers at once.

        Raises:
            ValueError: The template refuses it.
        """
        messages = ({"role": "user", "content": text},)
        chat = Chat(messages, template_values={"enable_thinking": False})
        return self._render(chat, messages, "question", add_generation_prompt=True)[0]

    def _prompt(self, chat: Chat, source: str) -> str:
        """Return the text of the prompt, up to where the completion begins."""
        if not chat.prompt_messages:
            raise ValueError(
                f"{source}: no prompt is set apart in this row, as --train-on completion needs; use"
                " --train-on assistant, or rows with prompt and completion"
            )
        messages = chat.messages[: chat.prompt_messages]
        return self._render(chat, messages, source, add_generation_prompt=True)[0]

    def _render(
        self,
        chat: Chat,
        messages: Sequence[dict[str, Any]],
        source: str,
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Return the text of messages, and the spans of the template's marks in it."""
        from sppo.data.chat.rendering import RenderingError, render

        values = {
            **self.special_tokens,
            **chat.template_values,
            "messages": template_messages(tuple(messages)),
            "tools": chat.tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render(self.text, values, today=self.today)
        except RenderingError as error:
            raise ValueError(
                f"{source}: the chat template {one_line(self.name)} fails:"
                f" {one_line(error, most=300)}; correct the row, or give another --chat-template"
            ) from None


def _find(
    folder: Path, settings: dict[str, Any], option: str | None, *, tokenizer: Path
) -> tuple[str, str]:
    """Return the text and the name of the template."""
    if option == "chatml":
        return CHATML, option
    if option is not None:
        if not Path(option).is_file():
            raise ValueError(
                f"--chat-template {one_line(option)}: neither chatml nor a file; check the spelling"
            )
        return _read(Path(option)), option
    if (folder / TEMPLATE_FILE).is_file():
        return _read(folder / TEMPLATE_FILE), str(folder / TEMPLATE_FILE)
    name = str(folder / "tokenizer_config.json")
    found = settings.get("chat_template")
    if isinstance(found, str):
        return found, name
    if isinstance(found, list):
        named = {
            str(one.get("name")): one.get("template") for one in found if isinstance(one, dict)
        }
        default, with_tools = named.get("default"), named.get("tool_use")
        if isinstance(default, str) and isinstance(with_tools, str):
            return _one_of(with_tools, default), name
        if isinstance(default, str):
            return default, name
        raise ValueError(
            f"{name}: its chat_template has no entry called default, only"
            f" {one_line(', '.join(named))}; give one as --chat-template FILE"
        )
    raise ValueError(
        f"{tokenizer}: this tokenizer has no chat_template; give --chat-template FILE, or chatml"
    )


def _one_of(with_tools: str, without: str) -> str:
    """Return one template of two: the first if there are tools."""
    # The first line break after a tag is dropped, as is the last one of a template.
    first, second = (text.removesuffix("\n") for text in (with_tools, without))
    return "{%- if tools is not none %}\n" + first + "{%+ else %}\n" + second + "{%+ endif %}"


def _read(path: Path) -> str:
    try:
        return read_text_file(path, most_bytes=_MOST_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def _settings(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; none if there is no such file.

    Raises:
        ValueError: The file cannot be read, or holds no mapping.
    """
    try:
        value = read_json(path) if path.is_file() else {}
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {quoted(value)}, not a mapping")
    return value


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the text of the special tokens that a tokenizer has names for."""
    stated = {**_settings(folder / "special_tokens_map.json"), **settings}
    found = {}
    for name in _SPECIAL_TOKENS:
        token = stated.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _check_syntax(text: str, name: str) -> None:
    from jinja2 import TemplateSyntaxError

    from sppo.data.chat.rendering import compiled

    try:
        compiled(text)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"{one_line(name)}: line {error.lineno} of the chat template: {one_line(error.message)}"
            "; correct it, or give another --chat-template"
        ) from None
    except RecursionError:
        raise ValueError(f"{one_line(name)}: the chat template is nested too deeply") from None


def _day(text: str) -> Date:
    for form in ("%d %b %Y", "%Y-%m-%d"):
        try:
            return datetime.strptime(text, form).date()
        except ValueError:
            continue
    raise ValueError(f"--date {one_line(text)}: write a day as {DEFAULT_DATE} or 2024-07-26")
