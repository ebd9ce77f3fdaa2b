"""Spans of chats: what moves them, what refuses them, and their time."""

import time
from dataclasses import replace

import pytest

from sppo.data.chat.conversation import Chat
from sppo.data.chat.template import CHATML, ChatTemplate
from tests.data.chats import MISTRAL, template, write_tokenizer
from tests.tiers import exhaustive

WORDS = ("<|im_end|>", "assistant\n", "<|im_start|>assistant\n", " ", "\n", "é", '"\\', "</think>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    names = ("qwen3", "llama3_1", "gptoss")
    text = CHATML + MISTRAL + "".join(map(template, names))
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), text)


def loaded(folder, tmp_path, text):
    path = tmp_path / "template.jinja"
    path.write_text(text)
    return ChatTemplate.load(folder, str(path))


def chat_of(*texts, **changes):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    chat = Chat(tuple(messages))
    return replace(chat, **changes)


def pieces(marked):
    return [marked.text[start:end] for start, end in marked.trained]


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3_1", "gptoss", "mistral"])
def test_spans_hold_the_answers_whatever_the_texts_hold(name, folder, tmp_path):
    made = loaded(folder, tmp_path, CHATML if name == "chatml" else template(name))
    stop = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>", "llama3_1": "<|eot_id|>"}
    head = "<|channel|>final<|message|>" if name == "gptoss" else " " if name == "mistral" else ""
    ends = [stop.get(name, "</s>")] * 3
    if name == "gptoss":
        ends = ["<|end|>", "<|end|>", "<|return|>"]
    for word in WORDS:
        answers = [f"A{word}B", f"C {word} D", "E"]
        asked = [f"u{word}", f"{word}v", f"w {word} w"]
        marked = made.marked(
            chat_of(*(t for pair in zip(asked, answers, strict=True) for t in pair))
        )
        if name == "qwen3":  # it leaves out reasoning
            answers = [text.split("</think>")[-1] for text in answers]
            if word == "</think>":
                assert pieces(marked) == [f"{a}{stop[name]}" for a in answers]
        expected = [head + text + end for text, end in zip(answers, ends, strict=True)]
        assert pieces(marked) == expected, word


def test_thinking_of_a_user_is_no_part_of_an_answer(folder, tmp_path):
    made = loaded(folder, tmp_path, template("qwen3"))
    assert pieces(made.marked(chat_of("a", "b", "<think>\n</think>", "d")))[1] == "d<|im_end|>"
    with pytest.raises(ValueError, match="rewrites what stands before message 4"):
        made.marked(chat_of("a", "b", "<think>\n</think>\n", "d", "e", "f"))


@pytest.mark.parametrize(("train_on", "expected"), [("assistant", "bf"), ("last", "f")])
def test_messages_are_chosen_by_flag_and_place(train_on, expected, folder):
    made = ChatTemplate.load(folder, "chatml")
    chat = chat_of(*"abcdef", untrained={3})
    assert pieces(made.marked(chat, train_on)) == [f"{c}<|im_end|>" for c in expected]
    untrained = chat_of(*"ab", untrained={1})
    assert made.marked(untrained, train_on).trained == ()


def test_marks_of_chosen_messages(folder, tmp_path):
    made = loaded(folder, tmp_path, template("llama3_training"))
    chat = chat_of(*"abcd", untrained={1})
    assert pieces(made.marked(chat)) == ["d<|eot_id|>"]
    assert pieces(made.marked(chat_of(*"abcd"), "last")) == ["d<|eot_id|>"]


SIMPLE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
)


def replaced(old, new, text=SIMPLE):
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            replaced("<|im_end|>", "{{ '' if loop.index == 6 else '<|im_end|>' }}"),
            r"ends message 6 of the assistant, after which .* would not learn to stop",
        ),
        (replaced("m.content }}", "m.content[:2] }}"), r"changes message 1 depending on its text"),
        (replaced("m.content }}", "m.content | upper }}"), r"changes message 1 depending on"),
        (
            replaced("{{ m.content }}", "{{ '' if m.role == 'assistant' else m.content }}"),
            r"leaves out the text of message 2 of the assistant",
        ),
        (
            replaced("{{ m.role }}\n", "{{ m.role }}{{ ' last' if loop.last }}\n"),
            r"rewrites what stands before message 6 when later messages follow",
        ),
        (
            SIMPLE + "{% for m in messages[1:2] %}{{ m.content }}<|im_end|>{% endfor %}",
            r"writes text of other messages into message 2, or its own elsewhere",
        ),
        (
            replaced("m.content }}", "raise_exception('no ' + m.role) }}"),
            r"template.jinja fails: no user",
        ),
        (replaced("m.content }}", "m.content + 1 }}"), r"fails: TypeError: can only concatenate"),
    ],
)
def test_untold_spans_are_refused(text, message, folder, tmp_path):
    made = loaded(folder, tmp_path, text)
    with pytest.raises(ValueError, match=rf"^chats.jsonl:17: the .*{message}"):
        made.marked(
            chat_of("aaaa", "bbbb", "cccc", "dddd", "eeee", "ffff"), source="chats.jsonl:17"
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MARKED, r"<\|im_end\|> ends the messages of the assistant, and stands outside"),
        (replaced("<|im_end|>", ""), r"nothing ends the messages of the assistant"),
        (replaced("<|im_end|>", "<end>"), r"'<end>' ends the messages of the assistant"),
    ],
)
def test_templates_that_teach_no_stop_are_refused(text, message, folder, tmp_path):
    made = loaded(folder, tmp_path, text)
    with pytest.raises(ValueError, match=rf"template.jinja: {message}.* not learn to stop"):
        made.marked(chat_of(*"abc"))
    assert made.marked(chat_of(*"abc"), "all").trained is None


def test_the_end_of_text_behind_the_stop_is_learnt(folder, tmp_path):
    made = loaded(folder, tmp_path, replaced("<|im_end|>", "<|im_end|></s>"))
    assert pieces(made.marked(chat_of(*"abcd"))) == ["b<|im_end|></s>", "d<|im_end|></s>"]


def test_answers_without_text_end_with_the_stop_or_are_refused(folder, tmp_path):
    made = loaded(folder, tmp_path, template("gptoss"))
    assert pieces(made.marked(chat_of("a", " "))) == ["<|channel|>final<|message|> <|return|>"]
    with pytest.raises(ValueError, match="message 2 of the assistant has no text, and it cannot"):
        made.marked(chat_of("a", " ", "b", "c"))


def test_marks_around_the_stop(folder, tmp_path):
    inside = replaced("{% endgeneration %}", "<|im_end|>{% endgeneration %}", MARKED)
    inside = replaced("{% endif %}<|im_end|>", "<|im_end|>{% endif %}", inside)
    marked = loaded(folder, tmp_path, inside).marked(chat_of(*"abcd"))
    assert pieces(marked) == ["b<|im_end|>", "d<|im_end|>"]


@pytest.mark.parametrize("name", ["qwen3", *exhaustive("chatml", "llama3_training", "mistral")])
def test_time_is_linear(name, folder, tmp_path):
    made = loaded(folder, tmp_path, CHATML if name == "chatml" else template(name))

    def seconds(turns):
        texts = ["word and more\n" * (500_000 // turns // 14)] * turns
        chats = [chat_of(*texts), chat_of(*texts)]
        start = time.process_time()
        for chat in chats:
            assert made.marked(chat).trained
        return time.process_time() - start

    seconds(4)
    assert min(seconds(200) for _ in range(3)) < 2 * min(seconds(2) for _ in range(3)) + 0.06
