from datetime import date

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from sppo.data.preparation.chat import Chat
from sppo.data.preparation.chat_template import ChatTemplate
from tests.data.chats import ASKED, CALLED, REASONED, TOOLS, template, write_tokenizer

ORIGINALS = (
    "llama3_1",
    "llama3_2",
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "gemma3",
    "gptoss",
    "phi3",
    "phi3_5",
    "mistral",
    "deepseekv3",
    "cohere",
    "glm4moe",
    "lfm2",
    "nemotron_3_nano",
)
CHATS = {
    "asked": Chat(ASKED, None, {}, 4, (True,) * 5),
    "reasoned": Chat(REASONED, None, {"enable_thinking": False}, None, (True,) * 4),
    "called": Chat(CALLED, TOOLS, {}, None, (True,) * 8),
}


def loaded(tmp_path, text, **options):
    return ChatTemplate.load(write_tokenizer(tmp_path / "tokenizer", text), **options)


def rendered_by_transformers(tmp_path, chat, **options):
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    return tokenizer.apply_chat_template(
        list(chat.messages), tools=chat.tools, **chat.template_values, **options
    )


@pytest.mark.parametrize("name", ORIGINALS)
def test_ids_are_those_of_transformers(name, tmp_path):
    made = loaded(tmp_path, template(name), date=str(date.today()))
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    rendered = 0
    for chat in CHATS.values():
        try:
            ids = rendered_by_transformers(tmp_path, chat, return_dict=False)
        except Exception:
            with pytest.raises(ValueError, match=r"rows.jsonl:3: the chat template"):
                made.marked(chat, "all", "rows.jsonl:3")
            continue
        marked = made.marked(chat, "all")
        assert marked.trained is None
        assert backend.encode(marked.text, add_special_tokens=False).ids == ids
        rendered += 1
    assert rendered >= 1


def test_marks_are_those_of_transformers(tmp_path):
    made = loaded(tmp_path, template("llama3_training"))
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    theirs = rendered_by_transformers(
        tmp_path, CHATS["asked"], return_dict=True, return_assistant_tokens_mask=True
    )
    marked = made.marked(CHATS["asked"])
    encoding = backend.encode(marked.text, add_special_tokens=False)
    assert made.method == "marked"
    assert encoding.ids == theirs["input_ids"]
    assert marked.counting(encoding.offsets).astype(int).tolist() == theirs["assistant_masks"]


def test_completion_is_what_follows_the_prompt(tmp_path):
    made = loaded(tmp_path, template("llama3_1"))
    marked = made.marked(CHATS["asked"], "completion")
    assert [marked.text[start:end] for start, end in marked.trained] == ["Yes.<|eot_id|>"]
    with pytest.raises(ValueError, match=r"a.json:1: no prompt is set apart in this row"):
        made.marked(CHATS["reasoned"], "completion", "a.json:1")
