"""``sppo data show`` from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from sppo.data.chat.template import CHATML
from sppo.data.preparation.prepare import prepare_tokens
from tests.conftest import refuse, succeed
from tests.data.chats import write_tokenizer
from tests.data.rows import write_rows

TEXT = "Wie heißt du?<|end|>\x1b[31mIch – Qwen ☃"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Token data of two documents made by a tokenizer file, of which the second has a mask."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "tokenizer", "<|end|>")
    begin = TEXT.index("\x1b")
    rows = {"prompt": "", "completion": "Wie"}, {"prompt": TEXT[:begin], "completion": TEXT[begin:]}
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    prepare_tokens([path], tokenizer="tokenizer", out=Path("tokens"), end_of_document="none")
    return Path("tokens")


def test_text_with_marks(data: Path) -> None:
    text = succeed("data", "show", data, 1)
    assert "document 1 of 2 (from 0): 36 tokens, 21 trained on (58.3%)" in text
    assert text.endswith("\nWie heißt du?<|end|>«\\x1b[31mIch – Qwen ☃»\n")
    only = succeed("data", "show", data, 1, "--trained-only")
    assert only.endswith("\n«\\x1b[31mIch – Qwen ☃»\n")
    assert "Wie" not in only
    assert succeed("data", "show", data).endswith("\n«Wie»\n")


def test_json_has_all_ids(data: Path) -> None:
    found = json.loads(succeed("data", "show", data, 1, "--json"))
    backend = Tokenizer.from_file("tokenizer/tokenizer.json")
    assert found["ids"] == backend.encode(TEXT, add_special_tokens=False).ids
    assert len(found["trained"]) == len(found["ids"])
    assert sum(found["trained"]) == found["num_trained"]
    assert "".join(piece["text"] for piece in found["pieces"]) == TEXT
    assert [piece["trained"] for piece in found["pieces"]] == [False, True]


def test_bytes_and_ids_tell_their_own_text(data: Path) -> None:
    Path("a.txt").write_text("Grüß Gott")
    prepare_tokens([Path("a.txt")], tokenizer="bytes", out=Path("bytes"))
    assert succeed("data", "show", "bytes").endswith("\n«Grüß Gott<256>»\n")
    np.save("ids.npy", [54, 72, 68])
    prepare_tokens([Path("ids.npy")], tokenizer="ids", out=Path("ids"))
    assert "\nids: 54 72 68" in succeed("data", "show", "ids")


def test_the_tokenizer_is_the_one_of_the_tokens(data: Path) -> None:
    Path("tokens/tokenizer.json").rename("kept.json")
    assert "Ich" in succeed("data", "show", data, 1)
    Path("tokenizer/tokenizer.json").unlink()
    assert "copy it to tokens/tokenizer.json" in refuse("data", "show", data)
    other = write_tokenizer(Path("other"), "<|another|>") / "tokenizer.json"
    shutil.copy(other, "tokens/tokenizer.json")
    said = refuse("data", "show", data)
    assert "tokens/tokenizer.json: not the tokenizer that made these tokens" in said
    shutil.move("kept.json", "tokens/tokenizer.json")
    assert "Ich" in succeed("data", "show", data, 1)


@pytest.mark.parametrize(
    ("words", "method", "answers"),
    [
        ((), "told by turns", "«a<|im_end|>» «b<|im_end|>»"),
        (("--train-on", "last"), "told by turns", "«b<|im_end|>»"),
    ],
)
def test_chats_show_how_their_answers_were_told(words, method, answers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "tokenizer", CHATML)
    said = [
        {"role": r, "content": c} for r, c in zip(("user", "assistant") * 2, "qawb", strict=True)
    ]
    write_rows(Path("chats.jsonl"), {"chat": said})
    words = ("--column", "messages=chat", *words)
    excerpt = succeed(
        "data", "prepare", "--tokenizer", "tokenizer", "--out", "t", "chats.jsonl", *words
    )
    assert "«b<|im_end|>»" in excerpt
    text = succeed("data", "show", "t", "--trained-only")
    assert method in text
    assert " ".join(text.splitlines()[-len(answers.split()) :]) == answers
    found = json.loads(succeed("data", "show", "t", "--json"))
    asked = "last" if "last" in words else "assistant"
    assert (found["mask_method"], found["train_on"]) == ("turns", asked)


def test_prepare_ends_with_an_excerpt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "tokenizer", CHATML)
    said = [{"role": r, "content": f"{r} " * 400} for r in ("user", "assistant") * 20]
    write_rows(Path("chats.jsonl"), {"messages": said})
    text = succeed("data", "prepare", "--tokenizer", "tokenizer", "--out", "t", "chats.jsonl")
    assert text.endswith("[... and 29 more pieces; sppo data show prints all]\n")
    assert text.count("\n[...]\n") == 12
    assert len(text) < 12 * 700


def test_documents_that_are_not_there(data: Path) -> None:
    said = refuse("data", "show", data, 2)
    assert "tokens: no document 2; there are 2 documents, numbered from 0" in said
