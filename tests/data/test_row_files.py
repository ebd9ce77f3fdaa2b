"""Rows of every kind of file: the same tokens as plain lines, and damage named with its row."""

import gzip
import json
import random

import pytest

from sppo.data.preparation.prepare import prepare_tokens
from sppo.data.tokens import open_tokens
from tests.data.chats import (
    ASKED,
    CALLED,
    REASONED,
    TOOLS,
    template,
    with_json_arguments,
    write_tokenizer,
)
from tests.tiers import exhaustive

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

ROWS = [{"id": number, "text": f"row {number}: {'é€' * (number % 7)}\n"} for number in range(40)]


def prepared(tmp_path, *files, **options):
    out = tmp_path / "-".join(["tokens", *(file.name for file in files)])
    return prepare_tokens(files, tokenizer="bytes", out=out, **options)


def contents(tmp_path, *files):
    data = open_tokens(prepared(tmp_path, *files).directory)
    return data.tokens.tobytes(), data.document_offsets.tolist(), data.meta.tokens_sha256


def zstd(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def arrow(rows, write=pyarrow.ipc.new_stream):
    table = pyarrow.Table.from_pylist(rows)
    sink = pyarrow.BufferOutputStream()
    with write(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


def parquet_of(rows):
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=9)
    return sink.getvalue().to_pybytes()


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


KINDS = {
    "x.json": lambda rows: json.dumps(rows, indent=1).encode(),
    "lines.json": lines,
    "x.jsonl.gz": lambda rows: gzip.compress(lines(rows[:3])) + gzip.compress(lines(rows[3:])),
    "x.jsonl.zst": lambda rows: zstd(lines(rows[:3])) + zstd(lines(rows[3:])),
    "x.json.zst": lambda rows: zstd(json.dumps(rows).encode()),
    "x.parquet": parquet_of,
    "x.arrow": arrow,
    "file.arrow": lambda rows: arrow(rows, pyarrow.ipc.new_file),
}


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "plain.jsonl"
    path.write_bytes(lines(ROWS))
    return contents(tmp_path, path)


@pytest.mark.parametrize("name", KINDS)
def test_the_same_tokens_from_every_kind_of_file(tmp_path, plain, name):
    path = tmp_path / name
    path.write_bytes(KINDS[name](ROWS))
    told = []
    prepared(tmp_path / "told", path, on_progress=lambda done, total, _: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] <= told[-1][1] == path.stat().st_size
    assert contents(tmp_path, path) == plain


def test_whole_files_of_text_may_be_compressed(tmp_path):
    text = "a long text, é\n" * 9
    for name, data in (("x.txt", text.encode()), ("x.py.gz", gzip.compress(text.encode())),
                       ("x.txt.zst", zstd(text.encode()))):  # fmt: skip
        (tmp_path / name).write_bytes(data)
        assert contents(tmp_path, tmp_path / name)[0] == contents(tmp_path, tmp_path / "x.txt")[0]


def test_saved_datasets(tmp_path, plain):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(tmp_path / "saved", num_shards=3)
    assert contents(tmp_path, tmp_path / "saved") == plain
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=r"both: .* splits test, train; give one of them"):
        contents(tmp_path, tmp_path / "both")
    state = json.loads((tmp_path / "saved/state.json").read_text())
    for changes, message in (
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, r"saved: .* flatten_indices\(\)"),
        ({"_data_files": [{"filename": "no.arrow"}]}, "no.arrow: missing, and state.json names it"),
        ({"_data_files": 3}, "state.json: not what Dataset.save_to_disk writes"),
    ):
        (tmp_path / "saved/state.json").write_text(json.dumps({**state, **changes}))
        with pytest.raises(ValueError, match=message):
            contents(tmp_path, tmp_path / "saved")


def test_chats_from_every_kind_of_file(tmp_path):
    """Tables give each message the keys of all: those without a value are none of it."""
    datasets = pytest.importorskip("datasets")
    model = write_tokenizer(tmp_path / "model", template("qwen3"))
    called = with_json_arguments(CALLED)
    called[1]["content"] = None
    rows = [
        {"messages": called, "tools": TOOLS},
        {"messages": REASONED},
        {"messages": [{**ASKED[1], "train": True}, {**ASKED[2], "train": False}, *ASKED[3:]]},
    ]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for name in KINDS:
        (tmp_path / name).write_bytes(KINDS[name](rows))
    found = set()
    for name in (*KINDS, "saved"):
        out = tmp_path / f"tokens-{name}"
        meta = prepare_tokens([tmp_path / name], tokenizer=str(model), out=out).meta
        found.add((meta.tokens_sha256, meta.loss_mask_sha256, meta.documents_sha256))
    assert len(found) == 1


@pytest.mark.parametrize("name", ["x.arrow", *exhaustive("x.jsonl.gz", "x.jsonl.zst", "x.parquet")])
def test_damaged_files(tmp_path, name):
    """Wherever a file is cut or has another byte: an error of one line that names it, or none."""
    rows = [{"text": random.Random(number).randbytes(200).hex()} for number in range(60)]
    whole = KINDS[name](rows)
    path, draw, said = tmp_path / name, random.Random(0), []
    for _ in range(25):
        place = draw.randrange(len(whole))
        cut = draw.random() < 0.4
        other = bytes([whole[place] ^ draw.randrange(1, 256)])
        path.write_bytes(whole[:place] if cut else whole[:place] + other + whole[place + 1 :])
        try:
            prepare_tokens([path], tokenizer="bytes", out=tmp_path / "out", force=True)
        except ValueError as error:
            said.append(str(error))
    assert len(said) >= 10
    assert all(name in text and len(text.splitlines()) == 1 for text in said)
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_damage_is_named_with_the_row_before(tmp_path):
    rows = [{"text": random.Random(number).randbytes(4000).hex()} for number in range(60)]
    for name in ("x.jsonl.gz", "x.jsonl.zst", "x.arrow"):
        path = tmp_path / name
        path.write_bytes(KINDS[name](rows)[:-20000])
        with pytest.raises(
            ValueError, match=rf"{name}: after {path}(:|, row )\d\d: cannot be read"
        ):
            contents(tmp_path, path)
        assert sorted(file.name for file in tmp_path.iterdir()) == [name]
        path.unlink()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.json", b'{"text":\n"a"}', "x.json:1: not JSON.* a row is an object"),
        ("x.json", b"[1]", "x.json, row 1: a int, not an object"),
        ("x.jsonl", b'{"text": "a"}\n' + b"[" * 3000, "x.jsonl:2: nested too deeply"),
        ("x.json", b'[{"text": "a"}, {"text": 3}]', 'x.json, row 2: no string under "text"'),
        ("x.json", b'[{"text": "a"}', "x.json: not JSON"),
        ("x.jsonl.gz", b"text", "x.jsonl.gz: cannot be read: Not a gzipped file"),
        ("x.txt.gz", b"text", "x.txt.gz: cannot be read: Not a gzipped file"),
        ("x.txt.gz", gzip.compress(b"a\0b", mtime=0), "x.txt.gz is not text: byte 1 is NUL"),
        ("x.parquet", b"PAR1", "x.parquet: cannot be read"),
        ("x.parquet", parquet_of([{"a": 1}]), r'row 1: no string under "text" \(its keys: a\)'),
        ("x.arrow", b"", "x.arrow: cannot be read"),
        (
            "x.arrow",
            arrow([{"text": "a" * 7}, {"text": "b" * 7}]).replace(b"\7\0\0\0\16", b"\7\0\0\0\1"),
            "x.arrow: cannot be read: .*ffset",
        ),
    ],
)
def test_refused_files(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as told:
        contents(tmp_path, tmp_path / name)
    assert len(str(told.value).splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_what_another_process_wrote_meanwhile_is_kept(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    out = tmp_path / "out"

    def prepare(name, **options):
        prepare_tokens([tmp_path / f"{name}.txt"], tokenizer="bytes", out=out, **options)

    with pytest.raises(ValueError, match=r"out: cannot be moved into place: .*not empty; run the"):
        prepare("a", on_progress=lambda *_: prepare("b"))
    assert (out / "tokens.bin").read_bytes()[:1] == b"b"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.txt", "b.txt", "out"]


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for name in ("x.parquet", "x.arrow", "x.txt.zst"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ValueError, match=rf"{name}: .* files need .* 'sppo\[data\]'"):
            contents(tmp_path, tmp_path / name)
