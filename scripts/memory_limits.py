"""Train under a series of memory limits: each run succeeds, or is refused before it starts.

    python scripts/memory_limits.py --directory /tmp/limits

Needs the right to make control groups (root, in most containers). Prints a line with the exit code
for each limit and case: 0 for a run that trained, 3 or 4 for a run that was refused. Any other
outcome is a fault, and the script then exits with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOP = Path("/sys/fs/cgroup")
MIB = 1 << 20
LIMITS_MIB = (
    *(150, 200, 250, 270, 280, 290, 300, 310, 320, 330, 340, 360, 380, 400, 420, 440, 460, 480),
    *(500, 540, 580, 620, 680, 740, 800, 900, 1024),
)
LENGTH = 4096
RUN = f"""
model: {{preset: null, vocab_size: 256, hidden_size: 256, num_layers: 4, num_heads: 4,
  num_kv_heads: 2, mlp_size: 768}}
data: {{tokens: tokens}}
sequence: {{length: {LENGTH}, num_subsequences: 8, alignment: 64}}
train: {{steps: 3, dtype: fp32}}
checkpoint: {{every: 1, keep: 2}}
"""
SMALL = ("model.hidden_size=64", "model.num_layers=1", "model.mlp_size=64", "sequence.length=512")
CASES = {
    "fp32": (),
    "small": SMALL,
    "bf16": ("train.dtype=bf16",),
    "documents": ("train.dtype=bf16", "data.isolate_documents=true", "data.tokens=documents"),
    "disk": ("activations.disk=spill",),
    "state on disk": ("activations.disk=spill", "state.optimizer=disk", "model.hidden_size=512"),
    "background saves": ("checkpoint.async_save=true",),
    "retain": ("activations.policy=retain",),
    "two ranks": ("parallel.pipeline_parallel_degree=2",),
    "two replicas": ("parallel.data_parallel_degree=2", "train.sequences_per_step=2"),
}


@dataclass(frozen=True)
class ControlGroup:
    """Control group, of version 1 or 2, with a memory limit."""

    path: Path
    limit_file: str

    @staticmethod
    def make() -> ControlGroup:
        """Return a new group without a limit."""
        version_2 = (TOP / "cgroup.controllers").exists()
        path = (TOP if version_2 else TOP / "memory") / f"sppo-{uuid.uuid4().hex[:8]}"
        path.mkdir()
        return ControlGroup(path, "memory.max" if version_2 else "memory.limit_in_bytes")

    def limit(self, size: int) -> None:
        """Set the memory limit in bytes."""
        (self.path / self.limit_file).write_text(str(size))

    def run(self, arguments: Sequence[str], *, directory: Path) -> subprocess.CompletedProcess[str]:
        """Run ``sppo`` with `arguments` in the group."""
        enter = f"import os; open({str(self.path / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        return subprocess.run(
            [sys.executable, "-c", f"{enter}; from sppo.__main__ import main; main()", *arguments],
            capture_output=True,
            text=True,
            cwd=directory,
            timeout=600,
            check=False,
            env={"OMP_NUM_THREADS": "1", "COLUMNS": "200", **os.environ},
        )


def outcome(group: ControlGroup, case: str, limit_mib: int, directory: Path) -> tuple[bool, str]:
    """Return whether a run behaved as it should, and a line about it."""
    group.limit(limit_mib * MIB)
    output = f"out_{uuid.uuid4().hex[:8]}"
    words = ["train", "run.yaml", f"train.output={output}", *CASES[case]]
    done = group.run(words, directory=directory)
    if done.returncode == 0:  # continue from the checkpoint
        done = group.run([*words, "train.steps=5"], directory=directory)
    summary = directory / output / "run_summary.json"
    line = f"{limit_mib:5} MiB  {case:17} {done.returncode:4}  "
    if done.returncode == 0 and (directory / output / "loss.png").exists():
        memory = json.loads(summary.read_text())["memory_bytes"]
        planned, measured = memory["all"].values()
        growth = [round(value / MIB, 1) for value in memory.get("process growth", {}).values()]
        line += f"planned {planned / MIB:.0f} MiB, took {measured / MIB:.0f}; growth {growth}"
        return True, line
    said = done.stderr.strip().splitlines() or [""]
    refused = done.returncode in (3, 4) and "Traceback" not in done.stderr
    return refused and not (directory / output).exists(), line + said[-1][:150]


def main() -> None:
    """Run all cases under all limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="for runs; is made")
    parser.add_argument("--cases", nargs="*", default=[*CASES], choices=[*CASES])
    parser.add_argument("--limits", nargs="*", type=int, default=[*LIMITS_MIB], help="in MiB")
    chosen = parser.parse_args()
    prepare(chosen.directory)
    group = ControlGroup.make()
    faults = 0
    try:
        for case in chosen.cases:
            for limit_mib in chosen.limits:
                good, line = outcome(group, case, limit_mib, chosen.directory)
                faults += not good
                print(line if good else f"{line}  FAULT", flush=True)
    finally:
        group.path.rmdir()
    print(f"{len(chosen.cases) * len(chosen.limits)} runs, {faults} faults")
    sys.exit(min(1, faults))


def prepare(directory: Path) -> None:
    """Write a run file, token data of one and of many documents, and a directory for the tier."""
    (directory / "spill").mkdir(parents=True)
    (directory / "run.yaml").write_text(RUN)
    (directory / "ids").mkdir()
    lengths = {"tokens": (40 * LENGTH + 1,), "documents": tuple(17 + 7 * i for i in range(220))}
    import numpy as np

    for name, documents in lengths.items():
        folder = directory / "ids" / name
        folder.mkdir()
        for i, length in enumerate(documents):
            ids = np.random.default_rng(i).integers(0, 256, length, dtype=np.uint16)
            np.save(folder / f"{i:04}.npy", ids)
        words = ["data", "prepare", f"ids/{name}", "--tokenizer", "ids", "--vocab-size", "256"]
        subprocess.run(
            [sys.executable, "-m", "sppo", *words, "--out", name],
            cwd=directory,
            check=True,
            stdout=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    main()
