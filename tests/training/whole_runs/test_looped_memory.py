"""Memory of the looped order over long sequences: as predicted, and linear in the length.

Layers of the README's Llama shape have a sliding window, so that time grows linearly and a sequence
of 256Ki tokens takes minutes; all keys and values are stored nevertheless.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from sppo.offload.disk.disk_room import usable_directory
from sppo.units import GIB
from tests.conftest import write_run, write_tokens
from tests.training.jobs import summary

LENGTHS = (128 * 1024, 256 * 1024)
MODEL = {
    "preset": None,
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 2,
    "mlp_size": 1792,
    "sliding_window": 1024,
    "max_positions": LENGTHS[-1],
}
WAYS = {
    "memory alone": {"policy": "keep_attention", "kv": "recompute"},
    "disk": {"policy": "offload_all", "kv": "offload", "disk": "."},
}
EXACT = ("K/V and gradients", "activations")
"""Buckets whose every tensor is counted."""
DISK_BYTES = 32 * GIB


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_memory_is_as_predicted_and_linear(tmp_path, way):
    room = usable_directory(tmp_path).usable_bytes
    if way == "disk" and room < DISK_BYTES:
        pytest.skip(f"moves {DISK_BYTES / GIB:.0f} GiB, and {room / GIB:.0f} GiB may be used")
    write_tokens(tmp_path / "tokens", num_tokens=LENGTHS[-1] + 1, vocab_size=4096)
    memories = [_step_memory(tmp_path, length, WAYS[way]) for length in LENGTHS]
    for memory in memories:
        for bucket in EXACT:
            assert memory[bucket]["measured"] == memory[bucket]["predicted"]
        assert memory["all"]["measured"] == pytest.approx(memory["all"]["predicted"], rel=0.03)
    grown = {
        how: memories[1]["all"][how] - memories[0]["all"][how] for how in ("measured", "predicted")
    }
    assert grown["measured"] == pytest.approx(grown["predicted"], rel=0.03)


def _step_memory(directory, length, activations) -> dict[str, dict[str, int]]:
    """Train one step; return bytes by bucket, predicted and measured."""
    run_file = write_run(
        directory / f"{length}.yaml",
        model=MODEL,
        sequence={"length": length, "num_subsequences": length // 2048},
        parallel={"virtual_stages": MODEL["num_layers"]},
        activations=activations,
        train={"steps": 1, "dtype": "bf16", "output": f"out_{length}"},
    )
    command = [sys.executable, "-c", "from sppo.__main__ import main; main()", "train", run_file]
    subprocess.run(command, check=True, cwd=directory, timeout=1800)
    return summary(directory / f"out_{length}")["memory_bytes"]
