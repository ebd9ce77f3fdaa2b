"""Tokenizer files: end of text, nothing added, whole documents; streaming of the built-in ones."""

import json
import sys

import numpy as np
import pytest

import sppo.data.preparation.ids_files as ids_module
import sppo.data.preparation.tokenizers as tokenizers_module
from sppo.data.chat.marked_text import MarkedText
from sppo.data.preparation.ids_files import scan_ids
from sppo.data.preparation.tokenizer_file import load_tokenizer_file
from sppo.data.preparation.tokenizers import ByteTokenizer

hf = pytest.importorskip("tokenizers")


def _save_tokenizer(path, *, added, words=("a", "b")):
    """Words split at spaces; a post-processor, truncation and padding that must not act."""
    vocabulary = {word: number for number, word in enumerate(("[UNK]", *words))}
    tokenizer = hf.Tokenizer(hf.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<bos>", *added])
    tokenizer.post_processor = hf.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(path))
    return tokenizer


def test_file_tokenizer_adds_and_cuts_nothing(tmp_path):
    _save_tokenizer(tmp_path / "tokenizer.json", added=["<|endoftext|>"])
    tokenizer = load_tokenizer_file(str(tmp_path), end_of_document="auto")
    texts = [MarkedText(text, None) for text in ("a b a b b\n", "b", "")]
    encoded = tokenizer.encode_texts(texts)
    assert [ids.tolist() for ids, _ in encoded] == [[1, 2, 1, 2, 2], [2], []]
    assert [counts for _, counts in encoded] == [None] * 3
    assert tokenizer.description.end_of_document == 4
    assert tokenizer.vocab_size == 5


@pytest.mark.parametrize(
    ("added", "words", "configured", "end"),
    [
        (["<|im_end|>", "<|endoftext|>"], ("a",), "<|im_end|>", "<|endoftext|>"),
        (["<stop>"], ("a",), "<stop>", "<stop>"),
        (["<stop>"], ("a",), {"content": "<stop>"}, "<stop>"),
        (["<stop>"], ("a", "</s>"), None, None),  # an ordinary word is no end of text
        (["<stop>"], ("a",), "<absent>", None),
    ],
)
def test_end_of_text(tmp_path, added, words, configured, end):
    made = _save_tokenizer(tmp_path / "tokenizer.json", added=added, words=words)
    if configured is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": configured}))
    loaded = load_tokenizer_file(str(tmp_path), end_of_document="auto")
    expected = None if end is None else made.token_to_id(end)
    assert loaded.description.end_of_document == expected


def test_end_of_document_given(tmp_path):
    _save_tokenizer(tmp_path / "tokenizer.json", added=["</s>"])
    name = str(tmp_path)
    assert load_tokenizer_file(name, end_of_document="none").description.end_of_document is None
    assert load_tokenizer_file(name, end_of_document=1).description.end_of_document == 1
    with pytest.raises(ValueError, match=r"--end-of-document 5: .* between 0 and 4"):
        load_tokenizer_file(name, end_of_document=5)


def test_library_missing(tmp_path, monkeypatch):
    _save_tokenizer(tmp_path / "tokenizer.json", added=[])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install 'sppo\[hf\]'"):
        load_tokenizer_file(str(tmp_path), end_of_document="auto")


def test_not_a_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer of the tokenizers library"):
        load_tokenizer_file(str(tmp_path), end_of_document="auto")


def _pieces_of_each_document(pieces):
    counts, count = [], 0
    for piece in pieces:
        count += len(piece.ids) > 0
        if piece.ends_document:
            counts.append(count)
            count = 0
    return counts


def test_large_documents_pass_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers_module, "_BLOCK_BYTES", 4)
    monkeypatch.setattr(ids_module, "_BLOCK_TOKENS", 4)
    (tmp_path / "a").write_bytes(bytes(range(10)))
    (tmp_path / "b").write_bytes(b"xy")
    np.save(tmp_path / "c.npy", np.arange(9))
    files = [tmp_path / "a", tmp_path / "b"]
    pieces = [piece for file in files for piece in ByteTokenizer().encode_file(file)]
    assert _pieces_of_each_document(pieces) == [3, 1]
    assert sum(piece.source_bytes for piece in pieces) == 12
    ids = scan_ids([tmp_path / "c.npy"], vocab_size=None, end_of_document="auto")
    pieces = list(ids.encode_file(tmp_path / "c.npy"))
    assert _pieces_of_each_document(pieces) == [3]
    assert np.concatenate([piece.ids for piece in pieces]).tolist() == list(range(9))
    assert sum(piece.source_bytes for piece in pieces) == (tmp_path / "c.npy").stat().st_size
