"""Decisions that the ranks of a run make together."""

import os
import subprocess
import sys

import pytest

from sppo.config import load_run
from sppo.data.tokens import open_tokens
from sppo.training.job import _configuration, fingerprint, input_facts
from tests.conftest import write_tokens
from tests.training.whole_runs.test_parallel_runs import overrides, train_as


def train_on_own_data(rank, directory, paths):
    """A pipeline of two ranks, each of which reads its own path; what it was told, if refused."""
    own = {"data.tokens": paths[rank], "train.sequences_per_step": 2}
    try:
        train_as(rank, directory, overrides((1, 2, 1), 1, **own))
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture
def copies(work, run_file):
    """Directories with the same tokens, and one with others."""
    run_file(model={"num_layers": 2})
    write_tokens(work / "copy")
    write_tokens(work / "other", seed=1)
    write_tokens(work / "documents", documents=[100])
    return work


def test_ranks_with_different_tokens_refuse_before_anything_is_made(ranks, copies):
    said = ranks.run(train_on_own_data, copies, ["tokens", "other"], ranks=2)
    assert said[0] == said[1]
    assert "data.tokens, tokens_sha256: " in said[0]
    assert " on rank 0, " in said[0]
    assert not (copies / "out").exists()


def test_ranks_may_read_equal_copies_in_different_places(ranks, copies):
    assert ranks.run(train_on_own_data, copies, ["tokens", "copy"], ranks=2) == ["", ""]
    here, there = (
        load_run(copies / "run.yaml", [f"data.tokens={path}"]) for path in ("tokens", "copy")
    )
    assert _configuration(here) == _configuration(there)


def test_tokens_that_no_longer_are_what_their_checksum_says(copies):
    """Each rank opens a file of the right size; nothing reads all of it before a run."""
    run = load_run(copies / "run.yaml")
    before = input_facts(run, [open_tokens("tokens")])
    file = copies / "tokens/tokens.bin"
    file.write_bytes(file.read_bytes()[::-1])
    after = input_facts(run, [open_tokens("tokens")])
    assert {key for key in before if before[key] != after[key]} == {
        "data.tokens, sample of tokens.bin"
    }


def test_a_fingerprint_of_a_large_file(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    before = fingerprint(file)
    assert fingerprint(file) == before
    file.write_bytes(bytes((1 << 20) - 1) + b"x")
    assert fingerprint(file) != before


@pytest.mark.exhaustive
def test_what_rank_0_refuses_for_all_is_told_once(work, run_file):
    """Found on the ranks, which know of memory and tiers, and before anything is made."""
    run_file(model={"num_layers": 2})
    words = ["parallel.pipeline_parallel_degree=2", "activations.policy=offload_all"]
    others = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    done = subprocess.run(
        [sys.executable, "-m", "sppo", "train", "run.yaml", *words],
        cwd=work,
        env={**others, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert done.stderr.startswith("error: activations.policy 'offload_all' offloads")
    assert len(done.stdout.splitlines()) == 1, "the ranks are announced, and nothing else"
    assert not (work / "out").exists()
