"""Tokens of one vocabulary are refused for weights of another; every other pair trains."""

import json

import numpy as np
import pytest

from sppo.config.model import ModelConfig
from sppo.data.preparation.prepare import prepare_tokens
from sppo.data.preparation.tokenizer_file import vocabulary_identity
from sppo.data.run_tokens import check_same_vocabulary, check_tokenizer
from sppo.data.tokens import open_tokens

hf = pytest.importorskip("tokenizers")

WORDS = {"a": 0, "b": 1, "c": 2}


def write_tokenizer(directory, words=WORDS, *, added=""):
    """A ``tokenizer.json`` of whole words, with one special token more if ``added`` names one."""
    directory.mkdir(exist_ok=True)
    tokenizer = hf.Tokenizer(hf.models.WordLevel(words, unk_token="a"))
    if added:
        tokenizer.add_special_tokens([added])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def model_of(directory):
    """A model with the weights in ``directory``, which are not looked at."""
    shape = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "mlp_size": 8, "vocab_size": 300}
    return ModelConfig(from_hf=None if directory is None else str(directory), **shape)


def tokens_of(tmp_path, tokenizer, *, out="tokens"):
    """A short text, or ids, prepared with ``tokenizer``."""
    source = tmp_path / ("text.npy" if tokenizer == "ids" else "text")
    if tokenizer == "ids":
        np.save(source, np.array([0, 1, 2]))
    else:
        source.write_text("a b c")
    prepare_tokens([source], tokenizer=tokenizer, out=tmp_path / out)
    return open_tokens(tmp_path / out)


def test_bytes_for_weights_with_a_tokenizer_are_refused(tmp_path):
    path = write_tokenizer(tmp_path / "model")
    data = tokens_of(tmp_path, "bytes")
    with pytest.raises(
        ValueError, match=r"tokens of tokenizer bytes \(vocabulary of 257\)"
    ) as told:
        check_tokenizer(data, model_of(tmp_path / "model"))
    assert f"the ids of {path} (vocabulary of 3)" in str(told.value)
    assert f"sppo data prepare --tokenizer {path} --out DIR" in str(told.value)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_bytes_for_weights_with_another_form_of_tokenizer_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(ValueError, match=f"know the ids of .*{name}"):
        check_tokenizer(tokens_of(tmp_path, "bytes"), model_of(tmp_path))


@pytest.mark.parametrize(
    "words", [{"a": 0, "b": 1}, {"a": 0, "c": 1, "b": 2}, {"a": 0, "b": 1, "d": 2}]
)
def test_tokens_of_another_vocabulary_are_refused(tmp_path, words):
    write_tokenizer(tmp_path / "model")
    other = write_tokenizer(tmp_path / "other", words)
    data = tokens_of(tmp_path, str(other))
    with pytest.raises(ValueError, match=f"tokens of tokenizer {other}"):
        check_tokenizer(data, model_of(tmp_path / "model"))


def test_the_same_words_in_another_file_are_the_same_vocabulary(tmp_path):
    path = write_tokenizer(tmp_path / "model", added="<chat>")
    path.write_text(json.dumps(json.loads(path.read_text())))
    other = write_tokenizer(tmp_path / "other")
    assert path.read_bytes() != other.read_bytes()
    check_tokenizer(tokens_of(tmp_path, str(other)), model_of(tmp_path / "model"))


@pytest.mark.parametrize(
    ("tokenizer", "has_tokenizer"), [("ids", True), ("bytes", False), ("bytes", None)]
)
def test_what_nobody_can_know_and_random_weights_are_allowed(tmp_path, tokenizer, has_tokenizer):
    if has_tokenizer:
        write_tokenizer(tmp_path / "model")
    model = model_of(None if has_tokenizer is None else tmp_path / "model")
    check_tokenizer(tokens_of(tmp_path, tokenizer), model)


def test_held_out_tokens_are_of_the_vocabulary_that_is_trained_on(tmp_path):
    path = write_tokenizer(tmp_path / "model")
    other = write_tokenizer(tmp_path / "other", {"a": 0, "x": 1})
    same = write_tokenizer(tmp_path / "same", added="<chat>")
    training, keys = tokens_of(tmp_path, str(path)).directory, ("data.eval_tokens", "data.tokens")
    for tokenizer in ("bytes", str(other)):
        held_out = tokens_of(tmp_path, tokenizer, out=f"held {tokenizer == 'bytes'}")
        with pytest.raises(ValueError, match="with the tokenizer of data.tokens"):
            check_same_vocabulary(held_out, training, keys=keys)
    check_same_vocabulary(tokens_of(tmp_path, str(same), out="chat"), training, keys=keys)
    check_same_vocabulary(tokens_of(tmp_path, "ids", out="ids"), training, keys=keys)


def test_a_vocabulary_is_its_words_by_id():
    def identity(vocabulary, added=()):
        content = {"model": {"vocab": vocabulary}, "added_tokens": added}
        return vocabulary_identity(json.dumps(content).encode())

    by_word, by_rank = identity({"b": 1, "a": 0}), identity([["a", -1.5], ["b", -2.5]])
    assert by_word == by_rank
    assert by_word is not None
    more = identity({"a": 0, "b": 1}, [{"id": 7, "content": "<chat>"}])
    assert (more.sha256, more.size) == (by_word.sha256, 8)
    for broken in (b"", b"[]", b"{}", b'{"model": {"vocab": {}}}', b'{"model": {"vocab": [1]}}'):
        assert vocabulary_identity(broken) is None
