"""Documents that are left out or held out, and the same tokens from several processes."""

import numpy as np
import pytest

from sppo.data.run_tokens import check_tokens
from sppo.data.tokens import open_tokens
from tests.data.rows import (
    ASKED,
    END,
    documents,
    prepared,
    write_chatml_tokenizer,
    write_rows,
)
from tests.make import make_run

MESSAGES = {"messages": ASKED}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_chatml_tokenizer(tmp_path_factory.mktemp("model"))


def test_documents_without_anything_trained_on(tokenizer, tmp_path):
    unanswered = {"messages": ASKED[:1]}
    path = write_rows(tmp_path / "x.jsonl", unanswered, *[MESSAGES] * 3, unanswered)
    with pytest.raises(ValueError, match=rf"^{path}:1: nothing of it is trained on, as of 2 of 5"):
        prepared(tokenizer, path, chat_template="chatml")
    made = prepared(tokenizer, path, chat_template="chatml", allow_empty=True)
    assert made.num_untrained_documents == 2
    assert made.untrained_documents == (f"{path}:1", f"{path}:5")
    assert made.meta.num_documents == 3
    many = write_rows(tmp_path / "many.jsonl", unanswered, *[MESSAGES] * 99)
    made = prepared(tokenizer, many, out=tmp_path / "many", chat_template="chatml")
    assert (made.num_untrained_documents, made.meta.num_documents) == (1, 99)


def test_longer_documents(tokenizer, tmp_path):
    path = write_rows(tmp_path / "x.jsonl", *({"text": "x" * n} for n in (3, 4, 5)))
    (tmp_path / "z.txt").write_text("x" * 9)
    made = prepared(tokenizer, path, tmp_path / "z.txt", longer_than="4=drop")
    assert np.diff(open_tokens(made.directory).document_offsets).tolist() == [4, 5]
    assert made.num_longer_documents == 2
    with pytest.raises(ValueError, match=r"x.jsonl:3: 5 tokens to train on, more than"):
        prepared(tokenizer, path, out=tmp_path / "no", longer_than="4=refuse")
    made = prepared("bytes", path, tmp_path / "z.txt", out=tmp_path / "b", longer_than="4=drop")
    assert (made.meta.num_documents, made.num_longer_documents) == (2, 2)


def test_held_out_documents_are_chosen_by_their_text(tokenizer, tmp_path):
    """Whatever other documents there are, and in whatever files: the same are held out."""
    texts = [f"text {number % 40}" for number in range(60)]
    one = write_rows(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    two = write_rows(tmp_path / "b.jsonl", *({"text": text} for text in reversed(texts[:30])))
    (tmp_path / "c.txt").write_text(texts[0])

    def divided(name, *files, tokenizer=tokenizer):
        places = tmp_path / name, tmp_path / f"{name}-held-out"
        made = prepared(tokenizer, *files, out=places[0], held_out="25%", held_out_out=places[1])
        assert made.held_out.num_documents == open_tokens(places[1]).num_documents
        return places

    kept, held_out = (documents(tokenizer, place) for place in divided("one", one))
    assert len(kept) + len(held_out) == 60
    assert 5 <= len(held_out) <= 30
    assert not set(kept) & set(held_out)
    sides = divided("two", two, tmp_path / "c.txt")
    assert set(documents(tokenizer, sides[0])) <= set(kept)
    assert set(documents(tokenizer, sides[1])) <= set(held_out)
    by_bytes = open_tokens(divided("bytes", one, tmp_path / "c.txt", tokenizer="bytes")[1])
    pieces = np.split(by_bytes.tokens, by_bytes.document_offsets[1:-1])
    texts_of_bytes = {f"«{bytes(piece[:-1].astype('u1')).decode()}{END}»" for piece in pieces}
    assert texts_of_bytes == set(held_out)
    for share, message in (("0.0001%", "none of 60 documents"), ("99.999%", "all of 60 documents")):
        with pytest.raises(ValueError, match=f"--held-out {share}: {message}"):
            prepared(
                tokenizer, one, out=tmp_path / "no", held_out=share, held_out_out=tmp_path / "n"
            )
    with pytest.raises(ValueError, match="the same directory as --out"):
        prepared(tokenizer, one, out=tmp_path / "no", held_out="9%", held_out_out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_the_same_tokens_from_several_processes(tokenizer, tmp_path, monkeypatch):
    rows = [{"messages": [{**ASKED[0], "content": f"q{n}"}, ASKED[1]]} for n in range(50)]
    path = write_rows(tmp_path / "x.jsonl", *rows)
    monkeypatch.setattr("sppo.data.preparation.workers._BATCH_ROWS", 7)
    made = prepared(tokenizer, path, chat_template="chatml")
    other = prepared(tokenizer, path, chat_template="chatml", out=tmp_path / "other", workers=2)
    for file in (tmp_path / "tokens").iterdir():
        assert (tmp_path / "other" / file.name).read_bytes() == file.read_bytes()
    assert made.meta == other.meta
    write_rows(tmp_path / "x.jsonl", *rows, {"messages": [{"role": "user"}]})
    with pytest.raises(ValueError, match=f"^{path}:51: message 1: its content is None"):
        prepared(tokenizer, path, chat_template="chatml", out=tmp_path / "no", workers=2)
    assert not (tmp_path / "no").exists()


def test_runs_of_chats_neither_join_nor_cut_them_unasked(tokenizer, tmp_path):
    path = write_rows(tmp_path / "x.jsonl", *[MESSAGES] * 3)
    data = open_tokens(prepared(tokenizer, path, chat_template="chatml").directory)
    longest = int(np.diff(data.document_offsets).max()) - 1
    documents = {"data": {"samples": "documents"}, "train": {"samples_per_step": 1}}

    def check(length, **keys):
        model = {"preset": "tiny", "vocab_size": data.vocab_size}
        sequence = {"length": length, **keys.pop("sequence", {})}
        check_tokens(make_run(model=model, sequence=sequence, **keys), data)

    with pytest.raises(ValueError, match=r"data.isolate_documents=true, or data.samples=documents"):
        check(8)
    check(8, data={"isolate_documents": True})
    check(longest, **documents)
    with pytest.raises(ValueError, match=r"sequence.longer refuse: 3 of 3 documents are longer"):
        check(longest - 1, **documents)
    check(longest - 1, sequence={"longer": "cut"}, **documents)
