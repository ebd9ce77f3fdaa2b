"""``sppo data stats`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sppo.data.preparation.prepare import prepare_tokens
from tests.conftest import call, succeed


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Token data of five documents, one of them with a loss mask."""
    monkeypatch.chdir(tmp_path)
    for number, tokens in enumerate((1, 3, 40, 40, 700)):
        np.save(f"{number}.npy", np.zeros(tokens, np.int64))
    np.save("4.mask.npy", np.arange(700) >= 600)
    files = [Path(f"{number}.npy") for number in range(5)]
    prepare_tokens(files, tokenizer="ids", out=Path("tokens"))
    return Path("tokens")


def test_table(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = succeed("data", "stats", data, "--length", "0.5Ki")
    assert "tokens: 5 documents, 779 tokens to train on" in text
    assert "length: mean 155.8, p0 0, p10 0, p50 39, p90 699" in text
    assert "180 of the labels count (23.1%); documents without any that counts: 1" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["50", "2", "40.00%", "78", "10.01%", "20.00%", "89.73%"] in rows
    assert ["512", "0", "0.00%", "0", "0.00%", "20.00%", "89.73%"] in rows
    assert "all labels count" not in text


def test_json(data: Path) -> None:
    found = json.loads(succeed("data", "stats", data, "--json"))
    assert found["num_counting_labels"] == 180
    assert [bucket["up_to"] for bucket in found["buckets"]] == [10, 50, 100, 200, 500, 1024]
    assert found["length_percentiles"]["p100"] == found["longest"] == 699
    buckets = json.loads(succeed("data", "stats", data, "--json", "--length", 39))["buckets"]
    assert [bucket["up_to"] for bucket in buckets] == [10, 39, 50, 100, 200, 500, 1024]
    assert buckets[1]["longer_tokens_share"] == pytest.approx(699 / 779)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such directory; token data is written by"),
        (["tokens", "--length", "0"], "--length 0: a length is from 1 to 1,073,741,824 tokens"),
        (["tokens", "--length", "8KI"], "--length: '8KI' is not a size"),
    ],
)
def test_bad_input(data: Path, words: list[str], message: str) -> None:
    result = call("data", "stats", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
