"""Seconds of the gated delta rule: products that devices share, and scans that they do not."""

from dataclasses import replace

import numpy as np
import pytest

from sppo.config import ModelConfig
from sppo.config.model.presets import PRESETS as MODELS
from sppo.cost.linear_attention.delta_rule import repeated_rule_flops, rule_flops, rule_seconds
from sppo.cost.tiles import CHUNK_TOKENS
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS

MODEL = ModelConfig.model_validate(MODELS["qwen3.5-9b"])
LINEAR = MODEL.linear_attention
TOKENS = np.array([64.0, 65.0, 16384.0])


# Milliseconds of forward and backward of one sequence of 32Ki tokens by the Triton kernels of
# flash-linear-attention 0.5.1 on H200 (benchmark_results_H200.txt of FlashQLA). Their backward
# repeats a forward scan and what comes before it, but no outputs.
@pytest.mark.parametrize(
    ("heads", "published_ms"), [(8, 0.902 + 2.743), (16, 1.241 + 3.701), (32, 1.890 + 5.697)]
)
def test_the_rates_of_the_h200_are_those_published(heads, published_ms):
    device = PRESETS["h200"].device
    linear = LINEAR.model_copy(update={"key_heads": heads // 2, "value_heads": heads})
    repeated = repeated_rule_flops(linear) - 2 * rule_flops(linear)
    flops, scans = 32768 * (3 * rule_flops(linear) + repeated), 3 * 32768 / CHUNK_TOKENS
    seconds = flops / device.rule_flops_per_s + scans * device.rule_step_s
    assert seconds * 1e3 == pytest.approx(published_ms, rel=0.02)


def test_more_devices_do_not_shorten_a_scan():
    whole = Workload(MODEL, PRESETS["h200"])
    shared = replace(whole, sequence_parallel_degree=4)
    step_s = whole.hardware.device.rule_step_s
    scan_s = np.array([1, 2, 256]) * step_s
    for own, among in zip(*(rule_seconds(w, LINEAR, tokens=TOKENS)
                            for w in (whole, shared)), strict=True):  # fmt: skip
        assert (among > scan_s).all()
        assert among[-1] > own[-1] / 4
    forward, _ = rule_seconds(shared, LINEAR, tokens=TOKENS)
    products_s = rule_flops(LINEAR) * TOKENS / 4 / whole.hardware.device.rule_flops_per_s
    assert forward == pytest.approx(products_s + scan_s)


def test_a_device_without_rates_of_the_rule_multiplies_as_elsewhere():
    device = replace(PRESETS["h200"].device, rule_flops_per_s=0.0, rule_step_s=0.0)
    known = Workload(MODEL, PRESETS["h200"])
    unknown = replace(known, hardware=replace(known.hardware, device=device))
    seconds, without = (rule_seconds(own, LINEAR, tokens=TOKENS)[0] for own in (known, unknown))
    assert 0 < without[-1] < seconds[-1]
