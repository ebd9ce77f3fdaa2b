"""The path of a saved tensor, which `scripts/saved_tensor_path.py` records, stays short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "saved_tensor_path.py"
MOST_MODULES, MOST_CLASSES = 20, 48


def test_the_path_of_a_saved_tensor_stays_short():
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    *modules, total = done.stdout.splitlines()
    found = {line.split()[0] for line in modules}
    ends = {"engine/stage.py", "offload/offload_store.py", "offload/disk/file_tier.py"}
    assert ends | {"activations/activation_layout.py"} <= found
    num_modules, num_classes = (int(word) for word in total.split() if word.isdigit())
    assert num_modules == len(found)
    assert num_modules <= MOST_MODULES
    assert num_classes <= MOST_CLASSES
