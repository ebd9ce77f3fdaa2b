"""The table of presets in docs/planning.md has the figures that plans use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sppo.hardware.presets import PRESETS

DOCUMENT = (Path(__file__).parents[2] / "docs/planning.md").read_text()
ACCELERATORS = [spec for spec in PRESETS.values() if spec.device.kind == "cuda"]


@pytest.mark.parametrize("spec", ACCELERATORS, ids=lambda spec: spec.name)
def test_the_row_of_a_preset(spec):
    device, network = spec.device, spec.network
    long = np.array([1e6])

    def attention(head_size):
        return " / ".join(
            f"{rate[0] / 1e12:.0f}"
            for rate in (
                device.attention_flops_per_s(
                    "bf16",
                    queries=long,
                    keys=long,
                    heads=32,
                    head_size=head_size,
                    backward=backward,
                )
                for backward in (False, True)
            )
        )

    products = device.gemm_efficiency * device.bf16_flops_per_s / 1e12
    cells = (
        spec.name,
        f"{products:.0f} of {device.bf16_flops_per_s / 1e12:.0f}",
        device.attention_backend,
        attention(64),
        attention(128),
        f"{device.memory_bytes_per_s / 1e9:.0f}",
        f"{spec.node.d2h_bytes_per_s / 1e9:.0f}",
        f"{network.intra_node_bytes_per_s / 1e9:.0f}",
        f"{network.inter_node_bytes_per_s / 1e9:.3g}",
    )
    assert f"| {' | '.join(cells)} |" in DOCUMENT
