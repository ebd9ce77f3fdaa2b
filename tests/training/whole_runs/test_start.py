"""A run that starts from another run's checkpoint: what it takes along, refuses and remembers."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from sppo.checkpoint.checkpoint import read_weights
from sppo.checkpoint.files import link_best
from sppo.config import ConfigError, load_run
from tests.conftest import refuse, succeed, write_masked, write_run, write_tokens
from tests.tiers import exhaustive
from tests.training.jobs import losses, saved_state, train_alone, trained

MODEL = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
BASE = {
    "model": MODEL,
    "data": {"shuffle": True},
    "optimizer": {"schedule": "constant", "eps": 1e-4},
    "checkpoint": {"every": 3, "keep": 9},
}
FIRST = "first/checkpoints/step_000003"
ALL = {"optimizer": True, "data": True}


@pytest.fixture(scope="module", params=["bf16", *exhaustive("fp32")])
def trained_once(tmp_path_factory, request):
    """Directory with ``run.yaml``, whose run ``first`` has trained six steps."""
    directory = tmp_path_factory.mktemp("first")
    with contextlib.chdir(directory):
        write_tokens(directory / "tokens")
        write_run(directory / "run.yaml", **BASE, train={"steps": 6, "dtype": request.param})
        train_alone(load_run(directory / "run.yaml", {"train.output": "first"}))
    return directory


@pytest.fixture
def first(work, trained_once):
    """Copy of that directory, which is the working directory."""
    return Path(shutil.copytree(trained_once, work, dirs_exist_ok=True))


def second(work, *, output="second", model=None, **sections):
    """Run that starts from step 3 of ``first``, with the keys of its model left out."""
    path = write_run(work / "second.yaml", **{**BASE, "train": {"steps": 3, "output": output}})
    raw = json.loads(json.dumps(load_run(path).model_dump(mode="json", exclude_unset=True)))
    raw["model"] = model or {}
    raw["train"]["dtype"] = json.loads((work / "first/run.json").read_text())["train"]["dtype"]
    start = {"from_run": "first", "step": 3, **sections.pop("start", {})}
    for name, keys in sections.items():
        raw[name] = {**raw.get(name, {}), **keys}
    path.write_text(json.dumps({**raw, "start": start}))
    return path


def test_with_optimizer_and_data_it_is_the_uninterrupted_run_bit_for_bit(first):
    train_alone(load_run(second(first, start=ALL)))
    assert losses(first / "second") == losses(first / "first")[3:]
    ours, theirs = (
        saved_state(first / run / "checkpoints" / step)
        for run, step in (("second", "step_000003"), ("first", "step_000006"))
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    "degrees",
    [
        ["parallel.pipeline_parallel_degree=2"],
        *exhaustive(
            ["parallel.sequence_parallel_degree=2", "parallel.sequence_parallel=megatron"],
            ["parallel.sequence_parallel_degree=2", "parallel.zero=3"],
        ),
    ],
    ids=str,
)
def test_other_degrees_go_on_alike(ranks, first, degrees):
    path = second(first, start=ALL)
    path.rename(first / "run.yaml")  # which ranks read
    ranks.run(trained, first, degrees, ranks=2)
    ours, theirs = (torch.tensor(losses(first / run)) for run in ("second", "first"))
    torch.testing.assert_close(ours, theirs[3:], rtol=2e-2, atol=0)


def test_weights_are_the_fp32_weights_and_moments_begin_at_zero(first):
    link_best(first / "first/checkpoints", step=3)
    still = second(first, start={"step": "best"}, optimizer={"lr": 0}, train={"steps": 1})
    train_alone(load_run(still))
    _, weights = read_weights(first / "second")
    _, expected = read_weights(first / FIRST)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    saved = saved_state(first / "second/checkpoints/step_000001")
    assert saved["optimizer.step"] == 1


def test_the_context_is_stretched_and_the_start_remembered(first):
    write_tokens(first / "long", num_tokens=1025)
    yarn = {"type": "yarn", "factor": 4, "original_max_positions": 64}
    stretched = second(
        first,
        model={"rope_theta": 5e4, "rope_scaling": yarn},
        data={"tokens": "long"},
        sequence={"length": 256},
    )
    run = load_run(stretched)
    assert load_run(run) == run  # as ranks are told it
    train_alone(run)
    metadata = json.loads((first / "second/checkpoints/step_000003/metadata.json").read_text())
    assert metadata["config"]["model"]["rope_scaling"]["factor"] == 4
    told = metadata["start"]
    assert (told["path"], told["step"], told["start"]) == (FIRST, 3, None)
    succeed("convert", "to-hf", "second", "exported", "--dtype", "fp32")
    readme = (first / "exported/README.md").read_text()
    assert f"step 3 of another run: {FIRST} (SHA-256 of its manifest: {told['digest']})" in readme

    shutil.rmtree(first / "first")  # what has started needs it no longer
    train_alone(load_run(stretched, {"train.steps": 5}))
    assert len(losses(first / "second")) == 5
    again = json.loads((first / "second/checkpoints/step_000005/metadata.json").read_text())
    assert again["start"] == told


def test_an_evaluation_of_the_initial_weights_is_that_of_the_checkpoint(first):
    path = second(first)
    initial, of_checkpoint = (
        json.loads(succeed("eval", file, "--json", *words))["loss"]
        for file, words in ((path, ["--initial"]), ("run.yaml", ["--checkpoint", FIRST]))
    )
    assert initial == of_checkpoint


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"model": {"num_layers": 3}}, "model.num_layers"),
        ({"model": {"preset": "tiny"}}, "'tiny-test' in first, from which this run starts; only "),
        ({"model": {"norm_eps": 1e-6}}, "model.norm_eps"),
        ({"start": {"from_run": "nowhere"}}, "nowhere holds no run.json: give the output"),
        (
            {"start": {"from_run": "nowhere"}, "model": {"rope_scaling": {"factor": 8}}},
            "has 1 problem",  # what the section adds to is unknown
        ),
        ({"start": {"step": 4}}, "start.step=4: first holds the checkpoints 3, 6; name one"),
        (
            {"start": {"optimizer": True}, "adapter": {"rank": 2}},
            "the moments of first along, and there layers.0.q.lora_a did not train; write start",
        ),
        ({"start": {"step": "best"}}, "start.step=best: first holds the checkpoints 3, 6;"),
        ({"start": {"step": "bst"}}, "Did you mean 'best'?"),
        ({"train": {"output": "first"}}, "first belongs to a run with another configuration"),
        (
            {"start": {"data": True}, "train": {"seed": 1}, "sequence": {"length": 32}},
            "sequence.length is 64 there, 32 here; train.seed is 0 there, 1 here. Write start.data",
        ),
        (
            {"start": {"data": True}, "data": {"tokens": "other"}},
            "other: other tokens than those that first",
        ),
        (
            {"start": {"data": True}, "data": {"tokens": "masked"}},
            "masked: other tokens that count in the loss than those that first",
        ),
        ({"start": {"moments": True}}, "start.moments"),
    ],
    ids=str,
)
def test_what_is_refused(first, sections, told):
    write_tokens(first / "other", seed=1)
    write_masked(first / "masked", [1, 0])
    sections = dict(sections)
    model = sections.pop("model", None)
    assert told in refuse("train", second(first, model=model, **sections))


def test_tokens_of_another_tokenizer_are_refused(first):
    write_tokens(first / "other")
    for name in ("tokens", "other"):
        meta = json.loads((first / name / "meta.json").read_text())
        meta["tokenizer"] |= dict.fromkeys(("name", "sha256", "vocabulary_sha256"), name)
        (first / name / "meta.json").write_text(json.dumps(meta))
    told = refuse("train", second(first, data={"tokens": "other"}))
    assert "data.tokens other are tokens of tokenizer other, and the run is trained on" in told
    assert "with the tokenizer of start.from_run=first" in told


def test_a_damaged_checkpoint_is_refused_before_anything_is_made(first):
    file = max((first / FIRST).iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    assert f"checkpoint {FIRST} is damaged" in refuse("train", second(first))
    assert not (first / "second").exists()


def test_a_learned_table_of_positions_keeps_its_rows(work):
    learned = {**MODEL, "position": "learned", "max_positions": 64}
    write_run(work / "run.yaml", **{**BASE, "model": learned}, train={"steps": 3})
    train_alone(load_run(work / "run.yaml", {"train.output": "first"}))
    with pytest.raises(ConfigError, match="model.max_positions"):
        load_run(second(work, model={"max_positions": 128}))
