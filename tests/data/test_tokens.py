"""Token directories: written data is read back unchanged, and damage is reported."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from sppo.data import tokens
from sppo.data.preparation import ids_files, token_writer
from sppo.data.preparation.prepare import prepare_tokens
from sppo.data.run_tokens import check_tokens
from sppo.data.tokens import (
    DOCUMENTS_FILE,
    LOSS_MASK_FILE,
    META_FILE,
    TOKEN_DATA_FILES,
    TOKENS_FILE,
    open_tokens,
    verify_tokens,
)
from tests.checkpoint.damage import flip_a_bit
from tests.conftest import write_tokens
from tests.data.streams import sequences_of, stream_of
from tests.make import make_run

DOCUMENTS = {"data": {"samples": "documents"}, "train": {"samples_per_step": 1}}


def _prepare(tmp_path, *documents, vocab_size=None):
    for number, ids in enumerate(documents):
        np.save(tmp_path / f"{number}.npy", np.array(ids, dtype=np.int64))
    files = [tmp_path / f"{number}.npy" for number in range(len(documents))]
    out = tmp_path / "tokens"
    prepare_tokens(files, tokenizer="ids", out=out, vocab_size=vocab_size)
    return out


def _prepare_masked(tmp_path, *documents):
    for number, (_, mask) in enumerate(documents):
        if mask is not None:
            np.save(tmp_path / f"{number}.mask.npy", np.array(mask, dtype=bool))
    return _prepare(tmp_path, *(ids for ids, _ in documents))


def test_round_trip(tmp_path):
    data = open_tokens(_prepare(tmp_path, [5, 6, 7], [8], [9, 1]))
    assert data.tokens.tolist() == [5, 6, 7, 8, 9, 1]
    assert data.tokens.dtype == np.uint16
    assert isinstance(data.tokens, np.memmap)
    assert data.document_offsets.tolist() == [0, 3, 4, 6]
    assert (data.num_tokens, data.num_documents, data.vocab_size) == (6, 3, 10)
    verify_tokens(data)


@pytest.mark.parametrize(
    ("largest", "dtype"), [(65535, np.uint16), (65536, np.uint32), (2**32 - 1, np.uint32)]
)
def test_the_narrowest_type_that_holds_the_vocabulary(tmp_path, largest, dtype):
    data = open_tokens(_prepare(tmp_path, [0, largest]))
    assert data.tokens.dtype == dtype
    assert data.tokens.tolist() == [0, largest]
    assert data.meta.max_id == largest


def _append(path):
    path.write_bytes(path.read_bytes() + bytes(16))


def _cut(path):
    os.truncate(path, 2)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (TOKENS_FILE, Path.unlink, "tokens.bin missing"),
        (DOCUMENTS_FILE, Path.unlink, "documents.npy missing"),
        (META_FILE, Path.unlink, "meta.json missing"),
        (TOKENS_FILE, _cut, r"2 bytes, but meta.json says 3 tokens of uint16 = 6"),
        (TOKENS_FILE, flip_a_bit, r"tokens.bin: sha256 .* has changed since"),
        (DOCUMENTS_FILE, _append, r"documents.npy: damaged: 16 bytes follow the array"),
        (
            DOCUMENTS_FILE,
            lambda path: np.save(path, np.array([0, 2, 3])),
            "sha256 of its starts .* the file has changed since",
        ),
        (LOSS_MASK_FILE, Path.unlink, "missing, and meta.json says that there is a loss mask"),
        (LOSS_MASK_FILE, _cut, "2 bytes, but meta.json says 3 tokens of uint8 = 3"),
        (
            LOSS_MASK_FILE,
            lambda path: path.write_bytes(bytes([1, 1, 1])),
            r"loss_mask.bin: sha256 .* has changed since",
        ),
    ],
)
def test_damaged_files(tmp_path, name, damage, message):
    directory = _prepare_masked(tmp_path, ([1], None), ([2, 3], [True, False]))
    verify_tokens(open_tokens(directory))
    damage(directory / name)
    with pytest.raises(ValueError, match=message):
        verify_tokens(open_tokens(directory))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 3}, r"format_version 3, but this program reads 1 and 2"),
        ({"dtype": "int8"}, r"dtype 'int8': .* 'uint16' or 'uint32'"),
        ({"num_tokens": -1}, r"num_tokens -1: .* greater than or equal to 0"),
        ({"extra": 1}, r"extra 1: Unexpected"),
        ({"tokenizer": {"kind": 3}}, r"meta.json: tokenizer.name .*: .*required"),
        ({"num_tokens": 10**30}, r"num_tokens 10+: .* less than or equal to"),
        ({"loss_mask_sha256": None}, "is one of other data"),
    ],
)
def test_faulty_meta(tmp_path, changes, message):
    directory = _prepare_masked(tmp_path, ([1, 2, 3], [True, True, False]))
    path = directory / META_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=message):
        open_tokens(directory)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 2, 1, 3], "start 2 is 1, but the one before is 2"),
        ([0, 1, 1, 3], "start 2 is 1, but the one before is 1"),
        ([0, 1, 2, 4], "start 3 is 4, but the last is the num_tokens of meta.json, 3"),
        ([1, 2, 3, 4], "start 0 is 1, but the first document starts at 0"),
        ([-1, 1, 2, 3], "start 0 is -1, but"),
        ([0, 2**63 - 1, -(2**63), 3], f"start 2 is {-(2**63)}, but the one before is {2**63 - 1}"),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 1 << 20])
def test_document_starts_ascend_inside_the_tokens(tmp_path, starts, message, block, monkeypatch):
    directory = _prepare(tmp_path, [1], [2], [3])
    np.save(directory / "documents.npy", np.array(starts))
    monkeypatch.setattr(tokens, "_STARTS_BLOCK", block)
    with pytest.raises(ValueError, match=f"documents.npy: {message}"):
        open_tokens(directory)


def test_data_from_before_starts_were_summed_is_read(tmp_path):
    path = _prepare(tmp_path, [1, 2], [3]) / META_FILE
    meta = json.loads(path.read_text())
    del meta["documents_sha256"]
    path.write_text(json.dumps(meta))
    assert open_tokens(path.parent).document_offsets.tolist() == [0, 2, 3]


def test_data_without_a_loss_mask_is_as_it_was(tmp_path):
    directory = _prepare(tmp_path, [1, 2, 3])
    assert {path.name for path in directory.iterdir()} == TOKEN_DATA_FILES
    assert open_tokens(directory).loss_mask is None


def test_a_loss_mask_longer_than_a_buffer(tmp_path, monkeypatch):
    monkeypatch.setattr(token_writer, "_BUFFER_BYTES", 16)
    monkeypatch.setattr(ids_files, "_BLOCK_TOKENS", 7)
    mask = [number % 3 > 0 for number in range(50)]
    directory = _prepare_masked(tmp_path, ([1] * 100, None), ([2] * 50, mask))
    data = open_tokens(directory)
    assert data.loss_mask.tolist() == [1] * 100 + [int(counts) for counts in mask]
    verify_tokens(data)


def test_a_loss_mask_has_no_other_bytes_than_0_and_1(tmp_path):
    directory = _prepare_masked(tmp_path, ([1, 2, 3], [True, True, False]))
    (directory / "loss_mask.bin").write_bytes(bytes([1, 7, 0]))
    data = open_tokens(directory)
    assert data.counts(2, 3).tolist() == [False]
    with pytest.raises(ValueError, match=r"loss_mask.bin: byte 7 at token 1, neither 0 nor 1"):
        data.counts(0, 3)


@pytest.mark.parametrize(
    ("documents", "keys", "words"),
    [
        ([41], {"sequence": {"length": 40}}, []),
        ([41], {"model": {"vocab_size": 40}}, ["ids up to 40 ", "vocab_size is 40; ", "least 41"]),
        (
            [41],
            {"model": {"vocab_size": 10}, "sequence": {"length": 41}},
            ["41 tokens, ", "sequence of 41 needs 42 (", "at most 40, or", "model.vocab_size"],
        ),
        ([1], {}, ["Prepare more data"]),
        ([1, 1, 9], {"sequence": {"length": 4, "longer": "cut"}, **DOCUMENTS}, []),
        (
            [1, 1, 9],
            {"sequence": {"length": 4, "longer": "drop"}, **DOCUMENTS, "model": {"vocab_size": 5}},
            [
                "none of its 3 documents is a sample",
                "dropped: 1, without a label as they have one token: 2",
                "raise sequence.length to at least 8, or write sequence.longer=cut",
                "model.vocab_size is 5",
            ],
        ),
        ([1, 1], DOCUMENTS, ["at most one token, which has no label; prepare other data"]),
    ],
)
def test_data_that_a_run_cannot_use(documents, keys, words):
    model = {"preset": "tiny", **keys.get("model", {})}
    run = make_run(**{**keys, "model": model})
    with pytest.raises(ValueError, match=".") if words else nullcontext() as caught:
        check_tokens(run, stream_of(documents))
    for word in words:
        assert word in str(caught.value), "all problems at once"


@pytest.mark.parametrize("name", [TOKENS_FILE, DOCUMENTS_FILE])
def test_a_file_that_is_cut_while_it_is_in_use_is_named(tmp_path, name):
    """Reading on in the mapping would kill the process with SIGBUS."""
    num_tokens = 1 << 17
    write_tokens(tmp_path / "data", num_tokens=num_tokens, documents=range(1, num_tokens, 2))
    data = open_tokens(tmp_path / "data")
    os.truncate(tmp_path / "data" / name, 4096)
    with pytest.raises(ValueError, match=f"{name}: 4096 bytes, and there were .* cut while"):
        sequences_of(data, 64, isolate_documents=True).row([1000])
