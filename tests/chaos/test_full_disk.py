"""Commands that write files, on a real disk that is full, and again once there is space.

A small disk in memory holds older outputs and a filler that leaves some pages. The exit code is 0
or 4 without a traceback; an error names a file; every output is the older one, complete, or absent;
no partial file is left; and a command that failed succeeds once the filler is gone. Needs
``unshare`` and the right to mount inside of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.chaos.isolation import can_isolate

pytestmark = pytest.mark.chaos

OLD = "the older file\n"
RUN = {
    "model": {"preset": "tiny-test", "vocab_size": 257, "num_layers": 2},
    "data": {"tokens": "../tokens", "shuffle": False},
    "sequence": {"length": 64, "num_subsequences": 2, "alignment": 8},
    "train": {"steps": 4, "dtype": "fp32", "output": "out"},
    "checkpoint": {"every": 2, "keep": 1},
}
SIMULATE = "simulate schedule=sppo ranks=2 sequences=1 subsequences=4"
KV = "parallel.virtual_stages=2 activations.kv=offload activations.disk=."
COMMANDS = {
    f"{SIMULATE} --png a.png --trace a.json --write-program a.txt": ("a.png", "a.json", "a.txt"),
    "solve ../solve.json -o plan.json": ("plan.json",),
    "eval ../trained.json --sequences 1 --png a.png": ("a.png",),
    "convert to-hf ../trained hf": (),
    "convert from-hf ../hf hf": (),
    "data prepare --tokenizer bytes --out new/tokens ../text.txt": (),
    "train ../run.json": (),
    "train ../run.json checkpoint.async_save=true": (),
    "train ../run.json train.tensorboard=true": (),
    f"train ../run.json {KV}": (),
    "train ../run.json parallel.pipeline_parallel_degree=2": (),
}
"""Files that each command replaces."""
NAMES = ("out", "hf", "new/tokens", "activations.disk=.", "a file tier of")
"""What errors may name beside these files."""
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=24m none disk && cd disk && for name in $OLDER; do echo "$OLD" > $name; done
dd if=/dev/zero of=filler bs=4096 2> /dev/null; truncate -s -$FREE filler
"$@" 2> ../errors; echo $? > ../code; rm filler; cp -r . ../first
test $(cat ../code) = 0 || "$@"; echo $? >> ../code; cp -r . ../second
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Text, tokens, run files, a trained run, and its HF form."""
    work = tmp_path_factory.mktemp("inputs")
    (work / "here").mkdir()
    (work / "text.txt").write_text("What goes in must come out. " * 4000)
    trained = {**RUN, "train": {**RUN["train"], "output": "../trained"}}
    hardware = {"preset": "h100", "nodes": 1, "devices_per_node": 2}
    for name, run in (("run", RUN), ("trained", trained), ("solve", {**RUN, "hardware": hardware})):
        (work / f"{name}.json").write_text(json.dumps(run))
    for words in (
        "data prepare --tokenizer bytes --out ../tokens ../text.txt",
        "train ../trained.json",
        "convert to-hf ../trained ../hf",
    ):
        subprocess.run(
            [sys.executable, "-m", "sppo", *words.split()], cwd=work / "here", check=True
        )
    return work


def assert_whole(directory, files, *, complete=False):
    assert not [path for path in directory.rglob("*") if ".partial" in path.name]
    for path in directory.rglob("*"):
        if path.suffix in (".json", ".jsonl") and (text := path.read_text()) != OLD:
            assert not text or path.suffix == ".json" or text.endswith("\n")
            for document in [text] if path.suffix == ".json" else text.splitlines():
                json.loads(document)
        if path.suffix == ".png" and path.read_bytes() != OLD.encode():
            assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert all((directory / name).exists() for name in files)
    assert not complete or all((directory / name).read_bytes() != OLD.encode() for name in files)


def names_one_of(names, line):
    """Whether a line has a name as whole words: "out/steps" has "out", and "without" has not."""
    return any(re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", line) for name in names)


@pytest.mark.skipif(not can_isolate(), reason="this machine lets nobody mount a small disk")
@pytest.mark.parametrize("free_pages", [0, 700])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_kind_of_file_on_a_full_disk(command, free_pages, inputs, tmp_path):
    work, files = tmp_path / "work", COMMANDS[command]
    shutil.copytree(inputs, work)
    (work / "disk").mkdir()
    options = {"OLD": OLD.strip(), "OLDER": " ".join(files), "FREE": str(4096 * free_pages)}
    shell = ["unshare", "-rm", "sh", "-c", ON_A_SMALL_DISK, "sh"]
    subprocess.run(
        [*shell, sys.executable, "-m", "sppo", *command.split()],
        cwd=work,
        env={**os.environ, **options},
        check=True,
        timeout=600,
    )
    first, second = map(int, (work / "code").read_text().split())
    said = (work / "errors").read_text()
    assert (first, second) == (0 if free_pages else 4, 0), said
    assert "Traceback" not in said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    named = [line for line in errors if names_one_of((*files, *NAMES), line)]
    assert bool(first) == bool(named), said
    assert_whole(work / "first", files)
    assert_whole(work / "second", files, complete=True)
