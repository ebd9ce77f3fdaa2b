"""``sppo data needle``: lengths, depths, answers and masks of documents, and refused requests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sppo.data.needle.cells import read_cells
from sppo.data.tokens import open_tokens, verify_tokens
from tests.conftest import refuse, succeed, tree

TEXT = "".join(f"Sentence {n} is about café number {n * n}. " for n in range(400))
NEEDLE = re.compile(r"\nThe special magic number for ([a-z-]+) is: (\d{7})\.\n")


@pytest.fixture(autouse=True)
def hay(work: Path) -> Path:
    (work / "hay.txt").write_text(TEXT)
    return work


def needle(*words: object) -> list[object]:
    return ["data", "needle", "--tokenizer", "bytes", "--haystack", "hay.txt", *words]


def documents(directory: str) -> list[tuple[list[int], list[bool]]]:
    data = open_tokens(directory)
    verify_tokens(data)
    ends = data.document_offsets.tolist()
    return [
        (data.ids(low, high).tolist(), data.counts(low, high).tolist())
        for low, high in zip(ends, ends[1:], strict=False)
    ]


@pytest.mark.parametrize("keys", [1, 4])
def test_each_document_asks_for_one_value_at_its_depth(keys: int) -> None:
    words = ("--lengths", "1001,2Ki", "--depths", "0:100:25", "--keys", keys, "--per-cell", 2)
    told = json.loads(succeed(*needle(*words, "--out", "out", "--json")))
    found = documents("out")
    cells = read_cells(Path("out"), num_documents=len(found))
    assert cells is not None
    assert told["num_documents"] == len(found) == 2 * 5 * 2
    assert told["num_tokens"] == 10 * (1001 + 2048)
    assert {(cell.length, cell.depth) for cell in cells.cells} == {
        (length, depth) for length in (1001, 2048) for depth in (0, 25, 50, 75, 100)
    }
    for cell, (ids, counts) in zip(cells.cells, found, strict=True):
        assert len(ids) == cell.length
        answer = bytes(i for i, counted in zip(ids, counts, strict=True) if counted).decode()
        text = bytes(ids).decode(errors="replace")  # the haystack may end within a character
        assert answer == cell.answer == text[-7:]
        hidden = {match[1]: (match[2], match.start()) for match in NEEDLE.finditer(text)}
        assert len(hidden) == keys
        value, place = hidden[cell.key]
        assert value == answer
        first, last = text.index("Sentence"), text.rindex("\n\nWhat is the special")
        assert (place - first) / (last - first) == pytest.approx(cell.depth / 100, abs=0.2)


def test_depths_are_exact_up_to_the_end_of_a_sentence() -> None:
    succeed(*needle("--lengths", "10000", "--depths", "30,60", "--out", "out"))
    for (ids, _), depth in zip(documents("out"), (30, 60), strict=True):
        text = bytes(ids).decode(errors="replace")
        place = NEEDLE.search(text).start()
        assert text[place - 1] == "."
        assert place / len(text) == pytest.approx(depth / 100, abs=0.03)


@pytest.fixture
def tokenizer(hay: Path) -> Any:
    """A tokenizer.json of byte pairs, with the special tokens of ChatML."""
    hf = pytest.importorskip("tokenizers")
    made = hf.Tokenizer(hf.models.BPE())
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    # With merges of a space and digits, the first token of an answer begins before it.
    made.train_from_iterator([TEXT, *(f"is: {n}" for n in range(1000, 9999, 7))], trainer)
    made.save("tokenizer.json")
    return made


WITH_TOKENIZER = ("--tokenizer", "tokenizer.json", "--lengths", "700", "--depths", "50")


def answer_of(tokenizer: Any, ids: list[int], counts: list[bool]) -> str:
    """The answer, whose tokens are the last ones, and the only ones that count."""
    count = sum(counts)
    assert counts == [False] * (len(ids) - count) + [True] * count
    return tokenizer.decode(ids[-count:], skip_special_tokens=False)


def test_answers_are_tokenized_with_their_question(hay: Path, tokenizer: Any) -> None:
    succeed(*needle(*WITH_TOKENIZER, "--out", "out"))
    ((ids, counts),) = documents("out")
    assert len(ids) == 700
    tail = tokenizer.decode(ids[-250:])
    tail = tail[tail.index("What is") :]
    expected = tokenizer.encode(f"\n\n{tail}").ids
    assert ids[-len(expected) :] == expected
    answer = answer_of(tokenizer, ids, counts)
    cell = json.loads((hay / "out/cells.json").read_text())["cells"][0]
    assert answer == f" {cell['answer']}"[-len(answer) :]
    assert (hay / "out/tokenizer.json").is_file()


def test_chats_begin_and_end_as_the_template_says(hay: Path, tokenizer: Any) -> None:
    words = ("--chat", "--chat-template", "chatml", "--keys", 4)
    succeed(*needle(*WITH_TOKENIZER, *words, "--out", "out"))
    ((ids, counts),) = documents("out")
    assert len(ids) == 700
    cell = json.loads((hay / "out/cells.json").read_text())["cells"][0]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\nSpecial magic numbers are hidden")
    key, value = cell["key"], cell["answer"]
    assert text.endswith(
        f"What is the special magic number for {key} in the text above?<|im_end|>\n"
        f"<|im_start|>assistant\nThe special magic number for {key} is: {value}"
    )
    assert ids.count(tokenizer.token_to_id("<|im_start|>")) == 2
    assert len(NEEDLE.findall(text)) == 4
    assert answer_of(tokenizer, ids, counts).strip() == value
    assert open_tokens("out").meta.is_chat


def test_the_same_command_changes_nothing_and_other_documents_are_refused(work: Path) -> None:
    words = needle("--lengths", "1Ki", "--depths", "0,100", "--out", "out")
    succeed(*words)
    before = tree(work)
    assert "holds these documents already; nothing was written" in succeed(*words)
    assert "holds other tokens" in refuse(*words, "--seed", 1)
    assert tree(work) == before
    succeed(*words, "--seed", 1, "--force")
    assert tree(work / "out") != {name: before[f"out/{name}"] for name in tree(work / "out")}


def test_a_document_does_not_depend_on_the_other_cells() -> None:
    succeed(*needle("--lengths", "1Ki,2Ki", "--depths", "0:100:50", "--out", "more"))
    succeed(*needle("--lengths", "2Ki", "--depths", "50", "--out", "one"))
    assert documents("one")[0] == documents("more")[4]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lengths", "10"], "--lengths 10: 1 needle, the question and the answer have"),
        (["--lengths", "1Mi"], "--haystack: its files have"),
        (["--lengths", "1k5"], "--lengths: '1k5' is not a size"),
        (["--lengths", "0"], "--lengths 0: a length is from 1"),
        (["--depths", "0:100"], "--depths '0:100': write whole percents"),
        (["--depths", "0:200:50"], "--depths '0:200:50'"),
        (["--depths", "-5"], "--depths '-5'"),
        (["--depths", "0:100:0"], "--depths '0:100:0'"),
        (["--chat"], "--tokenizer bytes: --chat needs the special tokens of a tokenizer.json"),
        (["--chat-template", "chatml"], "--chat-template chatml: only with --chat"),
        (["--tokenizer", "ids"], "--tokenizer ids: needles are text"),
        (["--haystack", "nowhere"], "nowhere: no such file"),
    ],
)
def test_refused(words: list[str], says: str, work: Path) -> None:
    before = tree(work)
    said = refuse(*needle("--lengths", "1Ki", "--out", "out", *words))
    assert says in said
    assert tree(work) == before


def test_damaged_cells_are_one_error() -> None:
    succeed(*needle("--lengths", "1Ki", "--depths", "0", "--out", "out"))
    with pytest.raises(ValueError, match=r"cells.json: not one cell for each of 2 documents"):
        read_cells(Path("out"), num_documents=2)
    cells = json.loads(Path("out/cells.json").read_text())
    cells["cells"][0]["depth"] = 101
    Path("out/cells.json").write_text(json.dumps(cells))
    with pytest.raises(ValueError, match=r"cells.json: cells.0.depth 101: .*data needle --force"):
        read_cells(Path("out"), num_documents=1)
    assert read_cells(Path("."), num_documents=1) is None
