"""``sppo data prepare`` from the command line: written files, refused input, leftovers."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sppo.data.preparation.token_writer import TokenWriter
from tests.conftest import refuse, succeed


def prepare(*words: object) -> dict[str, Any]:
    return json.loads(succeed("data", "prepare", *words, "--json"))


def refused(*words: object, code: int = 2) -> str:
    return refuse("data", "prepare", *words, code=code)


def tokens_of(directory: Path) -> list[int]:
    dtype = json.loads((directory / "meta.json").read_text())["dtype"]
    return np.fromfile(directory / "tokens.bin", dtype).tolist()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one text file in ``src``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.txt").write_bytes(b"hi")
    return tmp_path


def assert_nothing_left(work: Path) -> None:
    assert sorted(path.name for path in work.iterdir()) == ["src"]


def test_bytes(work: Path) -> None:
    (work / "src/b.bin").write_bytes(b"\xff\xe9")
    summary = prepare("--tokenizer", "bytes", "--out", "out", "src/b.bin", "src/a.txt")
    assert tokens_of(work / "out") == [255, 233, 256, 104, 105, 256]
    assert np.load(work / "out/documents.npy").tolist() == [0, 3, 6]
    assert summary["num_tokens"] == 6
    assert summary["num_documents"] == summary["num_files"] == 2
    assert summary["vocab_size"] == 257
    assert summary["source_bytes"] == 4
    assert summary["tokens_bytes"] == 12
    assert summary["tokenizer"]["end_of_document"] == 256
    assert not summary["unchanged"]


def test_jsonl(work: Path) -> None:
    (work / "src/x.jsonl").write_text('{"text": "a"}\n\n{"text": "\\u00e9", "id": 1}\n')
    prepare("--tokenizer", "bytes", "--out", "deep/er/out", "src/x.jsonl")
    assert tokens_of(work / "deep/er/out") == [97, 256, 0xC3, 0xA9, 256]


def test_ids_are_taken_as_they_are(work: Path) -> None:
    np.save(work / "src/0.npy", np.array([3, 70000, 0], dtype=np.int32))
    np.save(work / "src/1.npy", np.array([], dtype=np.int64))
    np.save(work / "src/2.npy", np.array([7], dtype=">u8"))
    summary = prepare("--tokenizer", "ids", "--out", "out", "src")
    assert tokens_of(work / "out") == [3, 70000, 0, 7]
    assert np.load(work / "out/documents.npy").tolist() == [0, 3, 4]
    assert summary["vocab_size"] == 70001
    assert summary["dtype"] == "uint32"
    assert summary["num_empty_documents"] == 1


def test_ids_with_vocabulary_and_end(work: Path) -> None:
    np.save(work / "src/0.npy", np.array([3, 4]))
    words = ("--tokenizer", "ids", "--vocab-size", 50, "--end-of-document", 49)
    assert prepare(*words, "--out", "out", "src/0.npy")["vocab_size"] == 50
    assert tokens_of(work / "out") == [3, 4, 49]


def save_masked(path: Path, ids: list[int], mask: list[bool] | None = None) -> None:
    np.save(path.with_suffix(".npy"), np.array(ids))
    if mask is not None:
        np.save(path.with_suffix(".mask.npy"), np.array(mask))


WITH_END = ("--tokenizer", "ids", "--end-of-document", 9, "--out", "out")


@pytest.mark.parametrize(
    "inputs", [["src"], ["--glob", "*.npy", "src"], ["src/0.npy", "src/0.mask.npy", "src/1.npy"]]
)
def test_loss_masks_beside_ids(work: Path, inputs: list[str]) -> None:
    save_masked(work / "src/0", [3, 4, 5], [True, False, False])
    save_masked(work / "src/1", [6])
    summary = prepare(*WITH_END, *inputs)
    assert tokens_of(work / "out") == [3, 4, 5, 9, 6, 9]
    assert list((work / "out/loss_mask.bin").read_bytes()) == [1, 0, 0, 0, 1, 1]
    assert summary["num_files"] == 2
    assert summary["num_counting_tokens"] == 3
    assert len(summary["loss_mask_sha256"]) == 64
    again = succeed("data", "prepare", *WITH_END, *inputs)
    assert "holds these tokens already" in again
    assert "predicting 3 of the tokens counts" in again


def test_other_loss_masks_are_other_data(work: Path) -> None:
    save_masked(work / "src/0", [3, 4, 5], [True, False, False])
    prepare(*WITH_END, "src")
    save_masked(work / "src/0", [3, 4, 5], [True, False, True])
    assert "holds these tokens with another loss mask; replace it with --force" in refused(
        *WITH_END, "src"
    )
    (work / "src/0.mask.npy").unlink()
    assert "holds these tokens with another loss mask" in refused(*WITH_END, "src")
    assert prepare(*WITH_END, "--force", "src")["num_counting_tokens"] is None
    assert not (work / "out/loss_mask.bin").exists()
    save_masked(work / "src/0", [3, 4, 5], [True, False, True])
    assert "holds these tokens with no loss mask" in refused(*WITH_END, "src")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"x.mask.npy": np.ones(2, bool)}, "src/x.mask.npy: the loss mask of x.npy, which is not"),
        (
            {"0.mask.npy": np.ones(2, bool)},
            "src/0.mask.npy: bool of shape [2], not bool of shape [3]",
        ),
        ({"0.mask.npy": b"yes"}, "src/0.mask.npy: not a .npy array"),
    ],
)
def test_refused_loss_masks(work: Path, files: dict[str, Any], message: str) -> None:
    save_masked(work / "src/0", [3, 4, 5])
    for name, content in files.items():
        if isinstance(content, bytes):
            (work / "src" / name).write_bytes(content)
        else:
            np.save(work / "src" / name, content)
    error = refused("--tokenizer", "ids", "--out", "out", "src")
    assert message in error
    assert len(error.splitlines()) == 1
    assert_nothing_left(work)


def test_a_mask_alone_is_no_document(work: Path) -> None:
    save_masked(work / "src/0", [3, 4, 5], [True, False, False])
    error = refused("--tokenizer", "ids", "--out", "out", "src/0.mask.npy")
    assert "src/0.mask.npy: a loss mask, and no ids are given" in error


def test_directories_are_sorted_filtered_and_without_hidden_files(work: Path) -> None:
    for name in ("z.py", "b/c.py", "b/a.py", ".git/x.py", ".hidden.py", "b/skip.md"):
        path = work / "src" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.stem[0])
    words = ("--tokenizer", "bytes", "--end-of-document", "none")
    prepare(*words, "--glob", "*.py", "--out", "out", "src")
    assert bytes(tokens_of(work / "out")) == b"acz"
    prepare(*words, "--glob", "b/*", "--glob", "a.txt", "--out", "other", "src")
    assert bytes(tokens_of(work / "other")) == b"hiacs"


def test_output_inside_the_input_is_not_input(work: Path) -> None:
    words = ("--tokenizer", "bytes", "--out", "src/out", "src")
    prepare(*words)
    assert prepare(*words)["unchanged"]


def test_report(work: Path) -> None:
    result = succeed("data", "prepare", "--tokenizer", "bytes", "--out", "out", "src")
    for text in ("out: written", "1 from 1 file ", "3 from 2 B", "257 ids"):
        assert text in result
    again = succeed("data", "prepare", "--tokenizer", "bytes", "--out", "out", "src")
    assert "holds these tokens already" in again


def test_existing_output_is_kept_unless_forced(work: Path) -> None:
    words = ("--tokenizer", "bytes", "--out", "out", "src")
    prepare(*words)
    before = (work / "out/tokens.bin").stat().st_mtime_ns
    assert prepare(*words)["unchanged"]
    assert (work / "out/tokens.bin").stat().st_mtime_ns == before
    assert "end of document 256; asked for bytes, 257, None" in refused(
        *words, "--end-of-document", "none"
    )
    (work / "src/a.txt").write_bytes(b"ho!")
    assert "holds other tokens (3 in 1 document, not 4 in 1)" in refused(*words)
    assert tokens_of(work / "out") == [104, 105, 256]
    prepare(*words, "--force")
    assert tokens_of(work / "out") == [104, 111, 33, 256]
    assert sorted(path.name for path in work.iterdir()) == ["out", "src"]


def test_damaged_output_is_replaced_only_by_force(work: Path) -> None:
    words = ("--tokenizer", "bytes", "--out", "out", "src")
    prepare(*words)
    (work / "out/tokens.bin").write_bytes(b"\0" * 6)
    assert "has changed since it was written" in refused(*words)
    (work / "out/tokens.bin").unlink()
    assert "holds part of token data" in refused(*words)
    prepare(*words, "--force")
    assert tokens_of(work / "out") == [104, 105, 256]


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_other_directories_are_never_replaced(work: Path, force: tuple[str, ...]) -> None:
    (work / "out").mkdir()
    (work / "out/thesis.tex").write_text("x")
    error = refused("--tokenizer", "bytes", "--out", "out", *force, "src")
    assert "thesis.tex, which is not token data and is never replaced" in error
    assert (work / "out/thesis.tex").read_text() == "x"


@pytest.mark.parametrize(
    ("tokenizer", "contents", "message"),
    [
        ("bytes", {}, "src/x: no such file or directory"),
        ("bytes", {"x": b""}, "no tokens: every document is empty"),
        ("bytes", {"x": None}, "src/x: no files (hidden ones are left out)"),
        ("bytes", {"x": b"ab\0c"}, "src/x is not text: byte 2 is NUL. Unpack"),
        ("ids", {"x": None}, "src/x: no files that match *.npy"),
        ("byte", {"x": b"a"}, "--tokenizer byte: neither 'bytes' nor 'ids', and no such file"),
        ("src", {"x": b"a"}, "--tokenizer src: the directory holds no tokenizer.json"),
        ("ids", {"x": b"hello"}, "src/x: not a .npy array"),
        ("ids", {"x": np.zeros((2, 2), np.int64)}, "int64 of shape [2, 2]"),
        ("ids", {"x": np.zeros(2)}, "float64 of shape [2]"),
        ("ids", {"x": np.zeros(2, bool)}, "bool of shape [2]"),
        ("ids", {"x": np.array([1, -100])}, "id -100 at position 1; ids are at least 0"),
        ("ids", {"x": np.array([1, 2**32])}, "id 4294967296 at position 1"),
        ("ids", {"x": np.zeros(0, np.int64)}, "no tokens: every document is empty"),
    ],
)
def test_refused_inputs(work: Path, tokenizer: str, contents: dict[str, Any], message: str) -> None:
    for name, content in contents.items():
        path = work / "src" / name
        if content is None:
            path.mkdir()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            with path.open("wb") as file:
                np.save(file, content)
    error = refused("--tokenizer", tokenizer, "--out", "deep/out", "src/x")
    assert message in error
    assert_nothing_left(work)


@pytest.mark.parametrize(("glob", "is_said"), [("setup.py", True), ("*.py", False)])
def test_a_glob_that_the_shell_expanded_is_explained(work: Path, glob: str, is_said: bool) -> None:
    error = refused("--tokenizer", "bytes", "--out", "out", "--glob", glob, work / "src")
    assert ("in quotes so that the shell leaves it as it is: '*.py'" in error) == is_said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokenizer", "bytes", "--vocab-size", 9), "--vocab-size 9: only for --tokenizer ids"),
        (("--tokenizer", "bytes", "--end-of-document", 257), "between 0 and 256"),
        (("--tokenizer", "bytes", "--end-of-document", "eos"), "write auto, none or the number"),
        (("--tokenizer", "ids", "--vocab-size", 3), "set --vocab-size to at least 6"),
        (("--tokenizer", "ids", "--end-of-document", -1), "--end-of-document -1"),
        (("--tokenizer", "ids", "--column", "text"), "--column text: write KEY=NAME"),
    ],
)
def test_refused_options(work: Path, words: tuple[object, ...], message: str) -> None:
    np.save(work / "src/x.npy", np.array([1, 5]))
    assert message in refused(*words, "--out", "out", "src/x.npy")
    assert_nothing_left(work)


def test_text_that_is_not_utf8_needs_the_byte_tokenizer(work: Path) -> None:
    hf = pytest.importorskip("tokenizers")
    hf.Tokenizer(hf.models.WordLevel({"a": 0}, unk_token="a")).save("src/tokenizer.json")
    (work / "src/x").write_bytes(b"ab\xff")
    error = refused("--tokenizer", "src", "--out", "out", "src/x")
    assert "src/x: byte 2 is 0xff, which is not UTF-8" in error
    assert_nothing_left(work)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_refusals_of_the_system(work: Path) -> None:
    """As root too: the kernel lets nobody make a directory in /proc or read address 0."""
    error = refused("--tokenizer", "bytes", "--out", "src/a.txt/out", "src")
    assert "src/a.txt/out: this or a parent of it is a file" in error
    error = refused("--tokenizer", "bytes", "--out", "/proc/out", "src")
    assert "--out /proc/out: cannot be written: " in error
    error = refused("--tokenizer", "bytes", "--out", "out", "src", "/proc/self/mem")
    assert "/proc/self/mem: cannot be read: Input/output error" in error
    assert_nothing_left(work)


def test_full_disk(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(TokenWriter, "append", full)
    error = refused("--tokenizer", "bytes", "--out", "deep/out", "src", code=4)
    assert "Disk quota exceeded" in error
    assert_nothing_left(work)


def test_without_a_tokenizer_it_says_which_there_are(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("a")
    said = refused(file, "--out", tmp_path / "out")
    assert "bytes, the path of a tokenizer.json, or ids" in said
    assert not (tmp_path / "out").exists()
