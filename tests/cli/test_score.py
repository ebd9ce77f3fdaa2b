"""``sppo score`` against transformers: log-probabilities, and what greedy decoding gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sppo.data.needle.cells import Cell, Cells, write_cells
from tests.conftest import refuse, succeed, tree
from tests.model.hf_models import log_probabilities, tiny_hf_model

VOCAB_SIZE = 61
PROMPTS = (9, 30, 1, 55, 17, 40, 2, 23)
ANSWER = 5


@pytest.fixture(scope="module")
def model():
    return tiny_hf_model("qwen3")[0]


@torch.no_grad()
def generated(model, prompt: list[int]) -> list[int]:
    """What transformers gives greedily after a prompt."""
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False, pad_token_id=0
    )
    return found[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def documents(model):
    """Prompts with answers: every other one is the model's own, and one has no answer."""
    draw = np.random.default_rng(3)
    found = []
    for number, length in enumerate(PROMPTS):
        prompt = draw.integers(0, VOCAB_SIZE, length).tolist()
        answer = generated(model, prompt)
        if number % 2:
            place = number % ANSWER
            answer[place] = (answer[place] + 1) % VOCAB_SIZE
        found.append((prompt, answer))
    return [*found[:3], ([7, 8], []), *found[3:]]


@pytest.fixture
def here(work: Path, model, documents) -> Path:
    """A working directory with the model, and with the documents, of which answers count."""
    model.save_pretrained("model")
    (work / "ids").mkdir()
    for number, (prompt, answer) in enumerate(documents):
        name = f"ids/{number:02}"
        np.save(f"{name}.npy", np.array(prompt + answer))
        np.save(f"{name}.mask.npy", np.array([False] * len(prompt) + [True] * len(answer)))
    words = ("--tokenizer", "ids", "--vocab-size", VOCAB_SIZE, "--out", "pairs", "ids")
    succeed("data", "prepare", *words)
    return work


WORDS = ("--model", "model", "--tokens", "pairs", "train.dtype=fp32")


def scored(*words: object) -> list[dict]:
    succeed("score", *words, "-o", "scores.jsonl")
    return [json.loads(line) for line in Path("scores.jsonl").read_text().splitlines()]


def test_each_document_as_transformers_says(here, model, documents) -> None:
    found = scored(*WORDS, "--per-token")
    assert [line["document"] for line in found] == list(range(len(documents)))
    for line, (prompt, answer) in zip(found, documents, strict=True):
        assert line["labels"] == len(answer)
        if not answer:
            assert (line["exact"], line["logprob"], line["logprobs"]) == (None, 0.0, [])
            continue
        assert line["exact"] == (generated(model, prompt) == answer)
        assert line["positions"] == [*range(len(prompt), len(prompt) + len(answer))]
        expected = log_probabilities(model, prompt + answer)[-len(answer) :].tolist()
        assert line["logprobs"] == pytest.approx(expected, abs=1e-5)
        assert line["logprob"] == pytest.approx(sum(expected), abs=1e-5 * len(expected))
    assert {line["exact"] for line in found} == {True, False, None}
    short = scored(*WORDS)
    assert short == [{k: v for k, v in line.items() if k in short[0]} for line in found]
    told = json.loads(succeed("eval", *WORDS, "--samples", "documents", "--length", 99, "--json"))
    assert told["exact"] == sum(line["exact"] is True for line in found) / len(PROMPTS)
    assert told["loss"] * told["num_tokens"] == pytest.approx(-sum(x["logprob"] for x in found))


def test_needles_are_found_where_greedy_decoding_gives_the_answer(here, model, documents) -> None:
    where = [(100 * (1 + number % 2), 50 * (number // 4)) for number in range(len(documents))]
    cells = tuple(Cell(n, *own, "key", "value") for n, own in enumerate(where))
    write_cells(Path("pairs"), Cells(1, 0, cells))
    assert "longer than sequence.length" in refuse("eval", *WORDS, "--length", "20")
    told = json.loads(succeed("eval", *WORDS, "--json"))
    assert (told["num_sequences"], told["are_samples"]) == (len(documents), True)
    given = [bool(answer) and generated(model, prompt) == answer for prompt, answer in documents]
    expected = {
        own: [is_given for at, is_given in zip(where, given, strict=True) if at == own]
        for own in sorted(set(where))
    }
    assert told["needles"] == [
        {"length": own[0], "depth": own[1], "documents": len(found), "exact": sum(found)}
        for own, found in expected.items()
    ]
    text = succeed("eval", *WORDS, "--png", "needle.png")
    rows = [line.split() for line in text.splitlines() if " %  " in line]
    assert [row[0] for row in rows] == ["0", "50", "100"]
    assert [
        f"{sum(found) / len(found):.0%}" for (_, depth), found in expected.items() if not depth
    ] == (rows[0][2:])


def test_a_run_scores_its_own_tokens_in_subsequences(here) -> None:
    Path("run.yaml").write_text(
        "model: {from_hf: model}\ndata: {tokens: pairs}\ntrain: {dtype: fp32}\n"
        "sequence: {length: 64, num_subsequences: 5, alignment: 1}\n"
    )
    for line, other in zip(scored("run.yaml", "--initial"), scored(*WORDS), strict=True):
        assert line["logprob"] == pytest.approx(other["logprob"], rel=1e-5)
        assert line["exact"] == other["exact"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*WORDS, "--length", "20"), "longer than sequence.length"),
        (("--model", "model"), "say what to evaluate as well, with --tokens DIR"),
        ((*WORDS, "-o", "no/where.jsonl"), "there is no directory no"),
    ],
)
def test_refused(here, words, says) -> None:
    before = tree(here)
    assert says in refuse("score", "-o", "scores.jsonl", *words)
    assert tree(here) == before
