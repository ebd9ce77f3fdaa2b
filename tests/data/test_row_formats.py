"""Formats of rows: what their documents say, what of them is trained on, and what is refused."""

import json

import pytest
from tokenizers import Tokenizer

from sppo.data.preparation.prepare import prepare_tokens
from sppo.data.tokens import TOKENIZER_FILES, open_tokens
from tests.data.chats import CALLED, REASONED, TOOLS, template, with_json_arguments, write_tokenizer
from tests.data.rows import (
    ASKED,
    END,
    SAID,
    UNMARKED,
    documents,
    prepared,
    write_chatml_tokenizer,
    write_rows,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_chatml_tokenizer(tmp_path_factory.mktemp("model"))


def document(tokenizer, tmp_path, row, **options):
    made = prepared(tokenizer, write_rows(tmp_path / "x.jsonl", row), **options)
    (text,) = documents(tokenizer, made.directory)
    return text


@pytest.mark.parametrize(
    ("row", "options", "text"),
    [
        ({"text": "all é"}, {}, f"«all é{END}»"),
        ({"text": "all"}, {"end_of_document": "none"}, "«all»"),
        ({"body": "all", "messages": 3}, {"names": {"text": "body"}}, f"«all{END}»"),
        ({"text": "all", "messages": 3}, {"format": "text"}, f"«all{END}»"),
        ({"prompt": "2+2=", "completion": " 4"}, {}, f"2+2=« 4{END}»"),
        ({"prompt": "2+2=", "completion": " 4"}, {"train_on": "all"}, f"«2+2= 4{END}»"),
        ({"prompt": "def f():\n", "completion": "    x  "}, {}, f"def f():\n«    x  {END}»"),
        ({"messages": ASKED}, {}, SAID),
        ({"chat": ASKED}, {"names": {"messages": "chat"}}, SAID),
        ({"messages": ASKED}, {"train_on": "all"}, f"«{UNMARKED}»"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a — b"}]},
         {}, SAID),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ASKED[1]]},
         {}, SAID),
        ({"instruction": "q", "input": "", "output": "a — b"}, {}, SAID),
        ({"prompt": ASKED[:1], "completion": ASKED[1:]}, {}, SAID.replace("»\n", "\n»")),
        ({"prompt": ASKED[:1], "completion": ASKED[1:]}, {"train_on": "assistant"}, SAID),
    ],
)  # fmt: skip
def test_documents_of_each_format(tokenizer, tmp_path, row, options, text):
    options = {"chat_template": "chatml", **options} if "im_end" in text else options
    assert document(tokenizer, tmp_path, row, **options) == text


def test_instructions_with_all_their_columns(tokenizer, tmp_path):
    row = {"instruction": "i", "input": "more", "output": "o", "system": "s",
           "history": [["q", "a"]]}  # fmt: skip
    said = document(tokenizer, tmp_path, row, chat_template="chatml")
    turns = said.replace("«", "").replace("»", "").split("<|im_start|>")[1:]
    assert [turn.removesuffix("<|im_end|>\n") for turn in turns] == [
        "system\ns", "user\nq", "assistant\na", "user\ni\nmore", "assistant\no",
    ]  # fmt: skip
    assert said.count("«") == 2
    last = prepared(tokenizer, tmp_path / "x.jsonl", out=tmp_path / "last", train_on="completion",
                    chat_template="chatml")  # fmt: skip
    assert documents(tokenizer, last.directory)[0].count("«o<|im_end|>") == 1


@pytest.mark.parametrize(
    "flag", [{"train": False}, {"loss": False}, {"weight": 0}, {"weight": 0.0}]
)
def test_messages_that_are_not_trained_on(tokenizer, tmp_path, flag):
    messages = [*ASKED[:1], {**ASKED[1], **flag}, *ASKED]
    said = document(tokenizer, tmp_path, {"messages": messages}, chat_template="chatml")
    assert said == UNMARKED + SAID


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input_ids": [5, 6, 7]}, [1, 1, 1]),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, [0, 0, 1]),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, [0, 1, 1]),
        ({"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]},
         [0, 1, 0]),
        ({"input_ids": [5, 6, 7], "loss_mask": [False, True, False]}, [0, 1, 0]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["ids", "file"])
def test_ids_with_masks(tokenizer, tmp_path, row, expected, name):
    path = write_rows(tmp_path / "x.jsonl", row)
    chosen = {"ids": {"tokenizer": "ids", "vocab_size": 9}, "file": {"tokenizer": str(tokenizer)}}
    made = prepare_tokens([path], out=tmp_path / "tokens", **chosen[name])
    data = open_tokens(made.directory)
    assert data.tokens.tolist() == [5, 6, 7]
    assert data.counts(0, 3).tolist() == [bool(counts) for counts in expected]
    assert (data.meta.format, data.meta.train_on) == ("ids", None)


def test_what_is_recorded_and_kept_with_the_tokens(tokenizer, tmp_path):
    text = template("qwen3")
    model = write_tokenizer(tmp_path / "qwen", text)
    path = write_rows(
        tmp_path / "x.jsonl",
        {"messages": CALLED, "tools": TOOLS},
        {"messages": REASONED, "chat_template_kwargs": {"enable_thinking": False}},
    )
    made = prepared(model, path)
    meta = made.meta
    assert (meta.format, meta.train_on, meta.mask_method) == ("messages", "assistant", "turns")
    assert meta.tokenizer.end_of_document is None
    assert meta.special_ids["eos_token"] == Tokenizer.from_file(
        str(model / "tokenizer.json")
    ).token_to_id("</s>")
    out = tmp_path / "tokens"
    assert (out / "chat_template.jinja").read_text() == text
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert {file.name for file in out.iterdir()} & TOKENIZER_FILES == {
        "chat_template.jinja", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    again = prepared(out, path, out=tmp_path / "again")
    assert again.meta.tokens_sha256 == meta.tokens_sha256
    assert prepared(model, path).unchanged


def test_tool_calls_in_their_usual_forms(tmp_path):
    """Arguments as a mapping or as JSON, tools as a list or as JSON: the same tokens."""
    model = write_tokenizer(tmp_path / "qwen", template("qwen3"))
    as_text = with_json_arguments(CALLED)
    path = write_rows(tmp_path / "x.jsonl", {"messages": CALLED, "tools": TOOLS})
    other = write_rows(tmp_path / "y.jsonl", {"messages": as_text, "tools": json.dumps(TOOLS)})
    first = prepared(model, path)
    assert prepared(model, other, out=tmp_path / "y").meta.tokens_sha256 == first.meta.tokens_sha256
    said = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"days": 1}}'},
        {"from": "observation", "value": "clear"},
        {"from": "gpt", "value": "Clear."},
    ]
    path = write_rows(tmp_path / "z.jsonl", {"conversations": said, "tools": json.dumps(TOOLS)})
    (text,) = documents(model, prepared(model, path, out=tmp_path / "z").directory)
    assert '{"name": "weather", "arguments": {"days": 1}}' in text
    assert "<tool_response>\nclear\n</tool_response>" in text


MESSAGES = {"messages": ASKED}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "q"}, "messages is 'q', not a list of messages"),
        ({"messages": []}, "no messages; remove the row"),
        ({"messages": ["q"]}, "message 1 is 'q', not"),
        ({"messages": [{"role": "bot", "content": "q"}]}, "message 1: role 'bot'; roles are"),
        ({"messages": [{"from": "bot", "value": "q"}]}, "message 1: from 'bot'; write human"),
        ({"messages": ASKED[1:]}, "the first message is the assistant's"),
        ({"messages": [{"role": "user"}]}, "message 1: its content is None, not text"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1: its content is 3, not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type image"),
        ({"messages": [*ASKED, {**ASKED[1], "weight": 0.5}]}, "message 3: its weight is 0.5; "),
        ({"messages": [*ASKED, {**ASKED[1], "train": "no"}]}, "message 3: its weight is 'no'; "),
        ({"messages": [ASKED[0], {"role": "assistant", "tool_calls": [{"name": 3}]}]},
         "message 2: tool call .*; write"),
        ({"messages": [ASKED[0], {"role": "assistant", "tool_calls": "{"}]},
         "message 2: its tool_calls: '{' is not JSON"),
        ({"messages": [ASKED[0], {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "{"}}]}]},
         "message 2: arguments of f: '{' is not JSON"),
        ({"messages": [ASKED[0], {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "[1]"}}]}]},
         r"message 2: arguments of f: \[1\], not an object"),
        ({**MESSAGES, "tools": 3}, "tools is 3, not a list of JSON schemas"),
        ({**MESSAGES, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs .*: not an"),
        ({**MESSAGES, "conversations": ASKED}, "has messages and conversations; choose one"),
        ({"text": "a"}, r"x.jsonl:2: text, and .*x.jsonl:1 is chats of format messages: all rows"),
        ({"messages": [{"role": "user", "content": "\ud800"}, ASKED[1]]}, "is half of a surrogate"),
        ({"other": 3}, r'x.jsonl:2: no list under "messages" \(its keys: other\)'),
    ],
)  # fmt: skip
def test_refused_chats(tokenizer, tmp_path, row, message):
    path = write_rows(tmp_path / "x.jsonl", MESSAGES, row)
    with pytest.raises(ValueError, match=message) as told:
        prepared(tokenizer, path, chat_template="chatml")
    assert f"{path}:2" in str(told.value)
    assert len(str(told.value).splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "a"}, {"text": 3}], {}, ':2: no string under "text"'),
        ([{"prompt": "a", "completion": "b"}, {"prompt": ASKED, "completion": ASKED}], {},
         ":2: prompt of messages, and .*:1 is prompt_completion: all rows have one format"),
        ([{"prompt": ASKED[:1], "completion": ASKED[1:]}, {"prompt": "a", "completion": "b"}],
         {"chat_template": "chatml"}, ":2: prompt is 'a', not a list of messages"),
        ([{"instruction": "a", "output": 3}], {"chat_template": "chatml"}, ":1: instruction, in"),
        ([{"text": "a", "messages": ASKED}], {}, ":1: has the columns of text and of messages"),
        ([{"text": "a"}], {"format": "chat"}, "--format chat: write auto, text, messages"),
        ([{"text": "a"}], {"format": "alpaca"}, 'no string under "instruction"'),
        ([{"text": "a"}], {"names": {"body": "text"}}, "--column body: no column; columns are"),
        ([{"body": "a"}], {"names": {"text": "boddy"}}, 'no string under "boddy".*keys: body'),
        ([{"text": "a"}], {"train_on": "assistant"}, "--train-on assistant: rows of format text: "),
        ([MESSAGES], {"train_on": "completion"}, "--train-on completion: rows of format messages"),
        ([MESSAGES], {"train_on": "none"}, "--train-on none: write assistant, last, all"),
        ([{"text": "a"}], {"chat_template": "chatml"}, "--chat-template: only for chats"),
        ([{"text": "a"}], {"date": "2024-07-26"}, "--date: only for chats"),
        ([MESSAGES], {"end_of_document": 3}, "--end-of-document 3: .* is a chat"),
        ([{"text": "a"}], {"longer_than": "3"}, "--longer-than 3: write LEN=drop or LEN=refuse"),
        ([{"text": "a"}], {"longer_than": "x=drop"}, "--longer-than: 'x' is not a size"),
        ([{"text": "a"}], {"held_out": "2"}, "--held-out and --held-out-out: give both"),
        ([{"text": "a"}], {"workers": 0}, "--workers 0"),
        ([{"input_ids": "a"}], {}, "input_ids 'a': not a list of whole numbers"),
        ([{"input_ids": [1, 2.5]}], {}, "not a list of whole numbers"),
        ([{"input_ids": [[1], [2, 3]]}], {}, "not a list of whole numbers"),
        ([{"input_ids": [1, 10**30]}], {}, "not a list of whole numbers"),
        ([{"input_ids": [1, 2**40]}], {}, "id 1099511627776 at position 1, but ids are from 0"),
        ([{"input_ids": [-1]}], {}, "id -1 at position 0, but ids are from 0"),
        ([{"input_ids": [1, 2], "labels": [2, -100]}], {}, "label 2 at position 0, where"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "1 labels for 2 input_ids"),
        ([{"input_ids": [1, 2], "loss_mask": [1, 2]}], {}, "loss_mask holds 2; weights of labels"),
    ],
)  # fmt: skip
def test_refused_rows_and_options(tokenizer, tmp_path, rows, options, message):
    path = write_rows(tmp_path / "x.jsonl", *rows)
    with pytest.raises(ValueError, match=message) as told:
        prepared(tokenizer, path, **options)
    assert len(str(told.value).splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["x.jsonl"]


def test_refused_files_and_tokenizers(tokenizer, tmp_path):
    chats = write_rows(tmp_path / "x.jsonl", MESSAGES)
    (tmp_path / "README.md").write_text("words")
    ids = write_rows(tmp_path / "y.jsonl", {"input_ids": [1]})
    refuse = pytest.raises
    with refuse(ValueError, match=r"README.md is a text, and .*x.jsonl:1 are of format messages"):
        prepared(tokenizer, tmp_path / "README.md", chats)
    with refuse(ValueError, match=r"y.jsonl:1: ids, and .*x.jsonl:1 is chats of format messages"):
        prepared(tokenizer, chats, ids, chat_template="chatml")
    with refuse(ValueError, match="has no chat_template; give --chat-template FILE, or chatml"):
        prepared(write_tokenizer(tmp_path / "model"), chats)
    with refuse(ValueError, match="--tokenizer bytes: .* is a chat, .* give the path"):
        prepared("bytes", chats)
    with refuse(ValueError, match="--tokenizer ids: rows of .* are of format messages"):
        prepared("ids", chats)
    with refuse(ValueError, match="give --vocab-size N"):
        prepared("ids", ids)
