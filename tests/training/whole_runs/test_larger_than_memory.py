"""Sequence whose saved activations exceed the memory of many machines, offloaded to a disk.

Layers with small inputs and wide MLPs save the most bytes per FLOP, which makes this about the
fastest run of its kind: minutes on two cores.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from sppo.config import load_run
from sppo.hardware.this_machine import detect_machine
from sppo.offload.disk.disk_room import usable_directory
from sppo.planning.run_plan import plan_run
from sppo.units import GIB
from tests.conftest import write_run, write_tokens
from tests.training.jobs import summary

LENGTH = 128 * 1024
MODEL = {
    "preset": None,
    "vocab_size": 256,
    "hidden_size": 64,
    "num_layers": 12,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_size": 16,
    "mlp_size": 4096,
    "sliding_window": 1024,
    "max_positions": LENGTH,
}
KEPT_BYTES, RUN_BYTES, DISK_BYTES = 24 * GIB, 6 * GIB, 25 * GIB


@pytest.mark.slow
def test_it_trains_in_a_fraction_of_the_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    room = usable_directory(tmp_path).usable_bytes
    if room < DISK_BYTES:
        pytest.skip(f"moves {DISK_BYTES / GIB:.0f} GiB, and {room / GIB:.0f} GiB may be used")
    write_tokens(tmp_path / "tokens", num_tokens=LENGTH + 1, vocab_size=256)
    run_file = write_run(
        tmp_path / "run.yaml",
        model=MODEL,
        sequence={"length": LENGTH, "num_subsequences": 64, "alignment": 128},
        activations={"policy": "offload_all", "disk": "."},
        train={"steps": 1, "dtype": "bf16"},
    )
    keeping = plan_run(
        load_run(run_file, ["activations.policy=retain"]),
        hardware=detect_machine(),
        available_bytes=1 << 50,
    )
    assert keeping.stages[0].memory.device.activations_bytes >= KEPT_BYTES
    command = [
        sys.executable,
        "-c",
        "from sppo.__main__ import main; main()",
        "train",
        str(run_file),
    ]
    subprocess.run(command, check=True, timeout=600)
    told = summary(tmp_path / "out")
    assert told["device_peak_bytes"] <= RUN_BYTES
    assert told["offloaded_bytes_per_step"] >= KEPT_BYTES
    memory = told["memory_bytes"]["all"]
    assert memory["measured"] == pytest.approx(memory["predicted"], rel=0.05)
