"""``sppo data mix`` from the command line, and mixtures that are refused before the start."""

import json

import pytest

from sppo.config import load_run
from sppo.data.run_tokens import open_sources
from sppo.data.sample_rows import TrainingData
from tests.conftest import refuse, succeed, tree, write_run, write_tokens

SOURCES = {"books": {"tokens": "books", "weight": 3}, "code": {"tokens": "code", "weight": 1}}


@pytest.fixture
def mixture(tmp_path, monkeypatch):
    """Two sources, of long and of short documents, and a run of them in ``run.yaml``."""
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "books", num_tokens=700, documents=(65, 130, 400))
    write_tokens(tmp_path / "code", num_tokens=300, documents=range(10, 300, 10), seed=1)
    write_run(
        tmp_path / "run.yaml",
        data={"tokens": None, "sources": SOURCES, "samples": "documents"},
        train={"samples_per_step": 8, "steps": 3},
    )
    return tmp_path


def test_table(mixture):
    text = succeed("data", "mix", "run.yaml")
    assert "3 steps draw 24 samples of " in text
    assert "every 1,024 draws have exactly as many of each source" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["books", "12", "696", "75.0%"] in [row[:4] for row in rows]
    assert "refused" not in text
    assert "more than its max_epochs 4: sppo train refuses this run" in succeed(
        "data", "mix", "run.yaml", "train.steps=90"
    )


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("train.steps=30", "data.weights=samples"),
        ("train.samples_per_step=null", "train.tokens_per_step=300", "train.steps=17"),
        ("data.samples=stream", "train.samples_per_step=null", "train.sequences_per_step=3"),
    ],
)
def test_json_counts_what_the_steps_have(mixture, words):
    found = json.loads(succeed("data", "mix", "run.yaml", *words, "--json"))
    run = load_run("run.yaml", words)
    data = TrainingData.of_sources(run, open_sources(run))
    samples = []
    for _, step in zip(range(run.train.steps), data.steps(), strict=False):
        samples += step
    assert [source["name"] for source in found["sources"]] == ["books", "code"]
    for index, source in enumerate(found["sources"]):
        own = [sample for sample in samples if data.table.source_of(sample) == index]
        tokens = sum(data.lengths(own))
        assert (source["drawn_samples"], source["drawn_tokens"]) == (len(own), tokens)
        assert source["epochs"] == len(own) / source["samples"]
        in_unit = (tokens, sum(data.lengths(samples)))
        if found["weights"] == "samples":
            in_unit = (len(own), len(samples))
        assert source["share"] == in_unit[0] / in_unit[1]
    assert [source["share_asked"] for source in found["sources"]] == [0.75, 0.25]


@pytest.mark.parametrize("weights", ["tokens", "samples"])
def test_shares_are_those_asked_for_over_many_draws(mixture, weights):
    words = ("train.steps=128", f"data.weights={weights}")
    found = json.loads(succeed("data", "mix", "run.yaml", *words, "--json"))
    for source in found["sources"]:
        # 1024 draws, of samples of unequal lengths in epochs that have not ended
        assert source["share"] == pytest.approx(source["share_asked"], abs=0.01)


def test_more_epochs_than_allowed_are_refused_before_the_start(mixture):
    before = tree(mixture)
    error = refuse("train", "run.yaml", "train.steps=40", "data.sources.code.max_epochs=1.5")
    assert "data.sources.books.max_epochs 4: 40 steps need " in error
    assert "data.sources.code.max_epochs 1.5: 40 steps need " in error
    needed = [line.split(" steps need ")[1].split()[0] for line in error.splitlines()]
    assert tree(mixture) == before
    words = [
        f"data.sources.{name}.max_epochs={number}"
        for name, number in zip(("books", "code"), needed, strict=True)
    ]
    succeed("config", "check", "run.yaml", "train.steps=40", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.sources.code.tokens=cod"], "cod: no such directory"),
        (["data.sources.code.weight=1e-9"], "data.sources.code.weight 1e-09: less than one of"),
        (
            ["data.tokens=books", "data.sources=null", "data.weights=samples"],
            "is the unit of the weights of data.sources, and there are none",
        ),
        (["data.tokens=books"], "data.tokens is not a mixture; write"),
        (["data.sources.a b={tokens: code, weight: 1}"], "a name of a source has letters"),
        (
            ["sequence.longer=drop", "sequence.length=5"],
            "books: none of its 4 documents is a sample",
        ),
    ],
)
def test_bad_input(mixture, words, message):
    assert message in refuse("data", "mix", "run.yaml", *words)


def test_sources_of_other_vocabularies_are_refused(mixture):
    write_tokens(mixture / "ids", num_tokens=300)  # of which no vocabulary is known
    for name, tokenizer in (("books", "a"), ("code", "b")):
        meta = json.loads((mixture / name / "meta.json").read_text())
        meta["tokenizer"] |= {
            "name": tokenizer,
            "sha256": tokenizer,
            "vocabulary_sha256": tokenizer,
        }
        (mixture / name / "meta.json").write_text(json.dumps(meta))
    error = refuse("train", "run.yaml", "data.sources.a={tokens: ids, weight: 1}")
    assert (
        "data.sources.code.tokens code are tokens of tokenizer b, and the run is trained" in error
    )
    assert "with the tokenizer of data.sources.books.tokens" in error


def test_an_evaluation_needs_tokens_of_its_own(mixture):
    error = refuse("eval", "run.yaml", "--initial")
    assert "A run of data.sources evaluates on those of data.eval_tokens" in error
    assert "held-out tokens" in succeed("eval", "run.yaml", "--initial", "data.eval_tokens=code")


def test_other_sources_are_another_run(mixture):
    succeed("train", "run.yaml", "train.steps=1")
    before = tree(mixture / "out")
    for word in ("data.sources.code.weight=2", "data.weights=samples", "data.shuffle=true"):
        assert "belongs to a run with another configuration" in refuse("train", "run.yaml", word)
    write_tokens(mixture / "new", num_tokens=300, documents=range(10, 300, 10), seed=2)
    (mixture / "code").rename(mixture / "old")
    (mixture / "new").rename(mixture / "code")
    assert "books, code: other tokens than" in refuse("train", "run.yaml")
    assert tree(mixture / "out") == before


def test_the_order_of_sources_in_a_file_changes_nothing(mixture):
    succeed("train", "run.yaml", "train.steps=1")
    backwards = "{code: {tokens: code, weight: 1}, books: {tokens: books, weight: 3}}"
    text = succeed("train", "run.yaml", "train.steps=2", f"data.sources={backwards}")
    assert "step 2/2 | " in text
    assert "step 1/2 | " not in text
    assert "mixture   books " in text


def test_solve_and_estimate_draw_steps_of_the_mixture(mixture):
    hardware = "hardware={preset: laptop-cpu}"
    assert "books, code" in succeed("solve", "run.yaml", hardware)
    succeed("estimate", "run.yaml", hardware)
    missing = refuse("solve", "run.yaml", hardware, "data.sources.code.tokens=cod")
    assert "data.sources.code.tokens cod: not there" in missing
