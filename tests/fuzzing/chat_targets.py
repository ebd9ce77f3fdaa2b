"""Target of fuzzing: chat templates of strangers, and conversations for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from hypothesis import strategies as st

from sppo.data.chat.rows import chat_of
from sppo.data.chat.template import CHATML, ChatTemplate, TrainOn
from tests.data.chats import ASKED, CALLED, MISTRAL, REASONED, TOOLS, template, write_tokenizer
from tests.fuzzing.damage import changed_trees, changed_words

NAMES = ("qwen3", "llama3_1", "llama3_training", "gemma3")
ROWS: tuple[dict[str, Any], ...] = (
    {"messages": ASKED},
    {"messages": REASONED, "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": CALLED, "tools": TOOLS},
    {"prompt": ASKED[:4], "completion": ASKED[4:]},
)


def chat_templates(draw: st.DrawFn, directory: Path) -> None:
    """A chat template with damaged words, and a conversation with damaged values."""
    text = draw(st.sampled_from([CHATML, MISTRAL, *map(template, NAMES)]))
    if not (directory / "tokenizer.json").exists():
        write_tokenizer(directory, "".join([CHATML, MISTRAL, *map(template, NAMES)]))
    (directory / "t.jinja").write_text(draw(changed_words(text)), errors="replace")
    loaded = ChatTemplate.load(directory, str(directory / "t.jinja"))
    row = draw(changed_trees(draw(st.sampled_from(ROWS))))
    if not isinstance(row, dict) or not ({"messages", "prompt", "completion"} & row.keys()):
        return
    if "messages" not in row and not {"prompt", "completion"} <= row.keys():
        return
    chat = chat_of(row, "rows.jsonl:1")
    marked = loaded.marked(chat, draw(st.sampled_from(get_args(TrainOn))), "rows.jsonl:1")
    spans = marked.trained or ()
    assert all(0 <= start < end <= len(marked.text) for start, end in spans)
    assert list(spans) == sorted(spans)
