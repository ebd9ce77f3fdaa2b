from datetime import date
from itertools import pairwise

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from sppo.data.chat.conversation import Chat
from sppo.data.chat.template import ChatTemplate
from tests.data.chats import ASKED, CALLED, REASONED, TOOLS, template, write_tokenizer
from tests.tiers import default_of, exhaustive

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
    "cohere2",
    "glm4moe",
    "lfm2",
    "nemotron_3_nano",
)
USUAL = ("llama3_1", "qwen3", "gemma3", "gptoss", "deepseekv3")
"""Families that differ in headers, reasoning, roles, channels and stops."""
CHATS = {
    "asked": Chat(ASKED, prompt_messages=4),
    "reasoned": Chat(REASONED, template_values={"enable_thinking": False}),
    "last": Chat(tuple(REASONED[2:])),
    "called": Chat(CALLED, tools=TOOLS),
}


def loaded(tmp_path, text, **options):
    return ChatTemplate.load(write_tokenizer(tmp_path / "tokenizer", text), **options)


def rendered_by_transformers(tmp_path, chat, **options):
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    return tokenizer.apply_chat_template(
        list(chat.messages), tools=chat.tools, **chat.template_values, **options
    )


@pytest.mark.parametrize("name", default_of(ORIGINALS, *USUAL))
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


@pytest.mark.parametrize(
    "name", ["llama3", "qwen3", "gptoss", *exhaustive("gemma3", "phi3", "cohere")]
)
def test_marks_are_those_of_transformers(name, tmp_path):
    made = loaded(tmp_path, template(f"{name}_training"), date=str(date.today()))
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    chat = CHATS["reasoned"]
    theirs = rendered_by_transformers(
        tmp_path, chat, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = made.marked(chat)
    encoding = backend.encode(marked.text, add_special_tokens=False)
    assert made.method == "marked"
    assert encoding.ids == theirs["input_ids"]
    assert marked.counting(encoding.offsets).astype(int).tolist() == theirs["assistant_masks"]
    assert 0 < sum(theirs["assistant_masks"]) < len(encoding.ids)


UNLIKE = {"llama3_1", "llama3_2", "mistral", "glm4moe"}
"""Originals of which trl has no variant with marks that renders any of these chats alike."""
SUPPLIED = {"<｜Assistant｜>", "<|start|>assistant", "<think>", "<think></think>", "</s>", ""}
"""What trl's templates mark though whoever generates supplies it, or though the turn is over."""


@pytest.mark.parametrize("name", default_of(sorted({*ORIGINALS, "llama3"} - UNLIKE), *USUAL[1:]))
def test_spans_are_the_marks_of_trl(name, tmp_path):
    ours = loaded(tmp_path / "ours", template(name))
    trl = loaded(tmp_path / "trl", template(f"{name}_training"))
    compared = 0
    for chat in CHATS.values():
        try:
            theirs = trl.marked(chat)
            mine = ours.marked(chat)
        except ValueError:
            continue
        if mine.text != theirs.text:
            continue
        trained, marked = (
            {at for span in one.trained for at in range(*span)} for one in (mine, theirs)
        )
        assert trained <= marked
        more = sorted(marked - trained)
        pieces = [[mine.text[at] for at in run] for run in runs(more)]
        for piece in map("".join, pieces):
            assert piece.strip() in SUPPLIED
        compared += 1
    assert compared >= 1


def runs(numbers):
    """Split ascending numbers where one is left out."""
    cuts = [i for i, (a, b) in enumerate(pairwise(numbers), start=1) if b != a + 1]
    return [numbers[a:b] for a, b in pairwise([0, *cuts, len(numbers)])]


def test_completion_is_what_follows_the_prompt(tmp_path):
    made = loaded(tmp_path, template("llama3_1"))
    marked = made.marked(CHATS["asked"], "completion")
    assert [marked.text[start:end] for start, end in marked.trained] == ["Yes.<|eot_id|>"]
    with pytest.raises(ValueError, match=r"a.json:1: no prompt is set apart in this row"):
        made.marked(CHATS["reasoned"], "completion", "a.json:1")
