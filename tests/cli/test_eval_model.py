"""``sppo eval --model``: the loss of a Hugging Face model, as transformers says, without a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sppo.data.tokens import open_tokens
from tests.conftest import refuse, succeed, tree, write_tokens
from tests.model.hf_models import log_probabilities, tiny_hf_model

VOCAB_SIZE, LENGTH = 61, 48
STARTS = (40, 41, 70, 130, 178)


@pytest.fixture(scope="module")
def model():
    return tiny_hf_model("qwen3")[0]


@pytest.fixture
def here(work: Path, model) -> Path:
    """A working directory with a model, and with tokens of six documents."""
    model.save_pretrained("model")
    write_tokens(work / "held", num_tokens=5 * LENGTH, vocab_size=VOCAB_SIZE, documents=STARTS)
    return work


@pytest.mark.parametrize("samples", ["stream", "documents"])
def test_the_loss_is_that_of_transformers(here, model, samples) -> None:
    words = ("--model", "model", "--tokens", "held", "--length", LENGTH, "--samples", samples)
    before = tree(here)
    told = json.loads(succeed("eval", *words, "train.dtype=fp32", "--json"))
    assert tree(here) == before
    data = open_tokens("held")
    edges = data.document_offsets.tolist()
    if samples == "stream":
        edges = [*range(0, data.num_tokens - 1, LENGTH)]
        pieces = [data.ids(low, low + LENGTH + 1) for low in edges[:-1]]
    else:
        wholes = [data.ids(low, high) for low, high in zip(edges, edges[1:], strict=False)]
        pieces = [w[i : i + LENGTH + 1] for w in wholes for i in range(0, len(w) - 1, LENGTH)]
    said = torch.cat([log_probabilities(model, piece) for piece in pieces])
    assert told["num_tokens"] == len(said)
    assert told["loss"] == pytest.approx(-float(said.mean()), rel=1e-5)
    assert told["weights_from"] == "model"
    assert told["tokens_from"] == "held"
    assert told["held_out"] is True


def test_tokens_and_length_of_a_run_file(here) -> None:
    Path("run.yaml").write_text(
        "model: {from_hf: model}\ndata: {tokens: held}\n"
        "sequence: {length: 24, boundaries: [0, 10, 24]}\n"
        "train: {dtype: fp32, sequences_per_step: 2}\n"
    )
    shared = ("--tokens", "held", "--length", LENGTH, "--samples", "documents", "--json")
    of_run = json.loads(succeed("eval", "run.yaml", "--initial", *shared))
    assert of_run == json.loads(succeed("eval", "--model", "model", *shared, "train.dtype=fp32"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name a run file, or a Hugging Face model: --model DIR --tokens DIR"),
        (["--model", "model"], "--model model: say what to evaluate as well, with --tokens DIR"),
        (["--model", "model", "--tokens", "held"], "with --length N"),
        (["run.yaml", "--model", "model"], "and the run file run.yaml: leave out one of both"),
        (["--model", "none", "--tokens", "held", "--length", "8"], "none"),
        (["--model", "model", "--tokens", "no", "--length", "8"], "no: no such directory"),
        (["--model", "model", "--tokens", "held", "--length", "x"], "--length: 'x' is not a size"),
        (["--model", "model", "--tokens", "held", "--length", "9Mi"], "held: 240 tokens"),
    ],
)
def test_refused(here, words, says) -> None:
    before = tree(here)
    assert says in refuse("eval", *words)
    assert tree(here) == before
