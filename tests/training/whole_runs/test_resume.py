"""A killed run, resumed by the same command, equals the uninterrupted run bit for bit."""

import shutil
import signal
from functools import cache
from pathlib import Path

import pytest
import torch

from sppo.checkpoint.checkpoint import read_weights
from tests.checkpoint.damage import flip_a_bit
from tests.conftest import LENGTH, SCREEN_LINES, tree, write_run, write_tokens
from tests.tiers import default_of
from tests.training.forked_sppo import in_step
from tests.training.jobs import records, summary

STEPS = 10
VARIANTS = {
    "plain": {},
    "epochs": {"data": {"shuffle": True}},  # ten steps over four sequences
    "bf16": {"train": {"dtype": "bf16"}},
    "several": {"train": {"sequences_per_step": 3}, "data": {"shuffle": True}},
    "async": {"checkpoint": {"async_save": True}},
    "documents": {"data": {"isolate_documents": True}},
    "samples": {
        "data": {"samples": "documents", "shuffle": True},
        "train": {"tokens_per_step": 2 * LENGTH},
    },
    "mixture": {
        "data": {
            "tokens": None,
            "sources": {
                "a": {"tokens": "tokens", "weight": 2, "max_epochs": 9},
                "b": {"tokens": "tokens", "weight": 1, "max_epochs": 9},
            },
        },
        "train": {"sequences_per_step": 3},
    },
    "experts": {
        "model": {
            "num_layers": 2,
            "experts": {"count": 4, "per_token": 2, "mlp_size": 16, "choice_bias": True},
        },
        "routing": {"balance_loss": 0.01, "bias_update": 0.02},
    },
    "all on a disk": {
        "model": {"num_layers": 3},
        "parallel": {"virtual_stages": 3},
        "activations": {"policy": "offload_all", "kv": "offload", "disk": "spill"},
        "state": dict.fromkeys(("weights", "gradients", "optimizer"), "disk"),
    },
}


class Run:
    """One variant of the run, and what it does when nothing disturbs it."""

    def __init__(self, sppo, directory, variant):
        self.sppo, self.directory = sppo, directory
        documents = (30, LENGTH + 1, 2 * LENGTH)
        (directory / "spill").mkdir()
        write_tokens(directory / "tokens", num_tokens=4 * LENGTH + 1, documents=documents)
        sections = {name: dict(keys) for name, keys in VARIANTS[variant].items()}
        train = {"steps": STEPS, **sections.pop("train", {})}
        checkpoint = {"every": 2, **sections.pop("checkpoint", {})}
        write_run(directory / "run.yaml", train=train, checkpoint=checkpoint, **sections)
        ended = self.train("undisturbed")
        assert ended.returncode == 0, ended.stderr
        self.records = self.read("undisturbed")
        assert [record["step"] for record in self.records] == list(range(1, STEPS + 1))

    def train(self, output, hook=None):
        words = ("train", "run.yaml", f"train.output={output}")
        return self.sppo(*words, cwd=self.directory, hook=hook)

    def read(self, output):
        return records(self.directory / output)

    def assert_undisturbed(self, output):
        """Every step once, every loss the same double, every weight the same bits."""
        keys = ("step", "loss", "grad_norm", "lr", "tokens", "skipped")
        ours, theirs = (
            [{key: record[key] for key in keys} for record in records]
            for records in (self.read(output), self.records)
        )
        assert ours == theirs
        steps, weights = zip(
            *(read_weights(self.directory / name) for name in (output, "undisturbed")), strict=True
        )
        assert [checkpoint.step for checkpoint in steps] == [STEPS, STEPS]
        for name, weight in weights[0].items():
            assert torch.equal(weight, weights[1][name]), name


@pytest.fixture(scope="module")
def runs(sppo, tmp_path_factory):
    """Function that returns a variant of the run; it is run once."""
    return cache(lambda variant: Run(sppo, tmp_path_factory.mktemp(variant), variant))


@pytest.fixture
def plain(runs):
    return runs("plain")


@pytest.mark.parametrize("variant", default_of(VARIANTS, "plain"))
def test_killed_in_step_seven(runs, variant):
    run = runs(variant)
    killed = run.train("killed", in_step(7, [signal.SIGKILL], action=5))
    assert killed.returncode == -signal.SIGKILL
    assert [record["step"] for record in run.read("killed")] == [1, 2, 3, 4, 5, 6]
    again = run.train("killed")
    assert again.returncode == 0, again.stderr
    after = 4 if "after step 4" in again.stdout and variant == "async" else 6
    assert f"going on after step {after} from killed/checkpoints/step_00000{after}" in again.stdout
    assert f"step {after + 1}/10" in again.stdout
    assert f"step {after}/10" not in again.stdout
    run.assert_undisturbed("killed")
    assert list((run.directory / "spill").iterdir()) == []


@pytest.mark.exhaustive
def test_killed_before_the_first_checkpoint_starts_anew(plain):
    assert plain.train("early", in_step(2, [signal.SIGKILL])).returncode == -signal.SIGKILL
    again = plain.train("early")
    assert again.returncode == 0
    assert "going on" not in again.stdout + again.stderr
    plain.assert_undisturbed("early")


def copy_of(run, name):
    return Path(shutil.copytree(run.directory / "undisturbed", run.directory / name))


def largest_file(directory):
    return max(directory.iterdir(), key=lambda path: path.stat().st_size)


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(plain):
    output = copy_of(plain, "damaged")
    file = largest_file(output / "checkpoints/step_000010")
    flip_a_bit(file)
    again = plain.train(output.name)
    assert again.returncode == 0, again.stderr
    said = next(line for line in again.stderr.splitlines() if "damaged" in line)
    assert f"{output.name}/checkpoints/step_000010 is damaged: {file.name}: " in said
    assert said.endswith("using step_000008")
    assert "going on after step 8" in again.stdout
    plain.assert_undisturbed(output.name)


def test_without_a_whole_checkpoint_nothing_is_done(plain):
    output = copy_of(plain, "ruined")
    for checkpoint in (output / "checkpoints").iterdir():
        flip_a_bit(largest_file(checkpoint))
    before = tree(output)
    again = plain.train("ruined")
    assert again.returncode == 2
    assert "every checkpoint in ruined/checkpoints is damaged: step_000010: " in again.stderr
    assert "step_000006: " in again.stderr
    assert "Traceback" not in again.stderr
    assert len(again.stderr.splitlines()) <= SCREEN_LINES
    assert tree(output) == before


@pytest.mark.parametrize(
    ("number", "done", "variant"),
    [
        (signal.SIGTERM, 5, "plain"),
        (signal.SIGTERM, 0, "plain"),
        pytest.param(signal.SIGINT, 5, "all on a disk", marks=pytest.mark.exhaustive),
    ],
)
def test_a_request_to_stop_saves_and_ends_well(runs, number, done, variant):
    run, output = runs(variant), f"asked-{number.name}-{done}"
    ended = run.train(output, in_step(done + 1, [number], action=6))
    assert ended.returncode == 128 + number, ended.stderr
    assert f"{number.name}: saving after step {done}" in ended.stdout
    left = f"stopped by {number.name} after step {done} of 10, {10 - done} left; to go on:\n"
    assert f"{left}sppo train run.yaml " in ended.stdout
    told = summary(run.directory / output)
    assert (told["steps"], told["interrupted_by"]) == (done, number.name)
    assert (run.directory / output / "loss.png").exists() == (done > 0)
    again = run.train(output)
    assert again.returncode == 0
    assert f"going on after step {done}" in again.stdout
    told = summary(run.directory / output)
    assert (told["steps"], told["interrupted_by"]) == (10, None)
    run.assert_undisturbed(output)


def test_a_second_request_ends_at_once(plain):
    ended = plain.train("twice", in_step(5, [signal.SIGTERM, signal.SIGTERM]))
    assert ended.returncode == 143
    assert "error: stopped by SIGTERM: the same command goes on from the newest checkpoint" in (
        ended.stderr
    )
    assert not (plain.directory / "twice/checkpoints/step_000005").exists()
    assert plain.train("twice").returncode == 0
    plain.assert_undisturbed("twice")


def test_a_run_that_is_done_is_left_as_it_is(plain):
    before = tree(plain.directory / "undisturbed")
    again = plain.train("undisturbed")
    assert again.returncode == 0
    assert "all 10 steps were done before, nothing to do" in again.stdout
    assert "going on" not in again.stdout + again.stderr
    assert tree(plain.directory / "undisturbed") == before


def test_more_steps_go_on(plain):
    copy_of(plain, "longer")
    changes = ("train.steps=12", "data.eval_tokens=tokens", "parallel.timeout_s=5")
    words = ("train", "run.yaml", "train.output=longer", *changes)
    assert plain.sppo(*words, cwd=plain.directory).returncode == 0
    assert [record["step"] for record in plain.read("longer")] == list(range(1, 13))
    assert [r["loss"] for r in plain.read("longer")[:10]] == [r["loss"] for r in plain.records]
