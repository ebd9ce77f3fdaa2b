"""Published rates of attention, interpolated between lengths and head sizes."""

from dataclasses import replace

import numpy as np
import pytest

from sppo.config.run import HardwareConfig
from sppo.hardware.published_attention import PublishedAttention, published_rates
from sppo.hardware.run_hardware import hardware_for

ROWS = (
    PublishedAttention("b", 64, (1024, 4096), (100.0, 400.0), (50.0, 200.0), "a paper"),
    PublishedAttention("b", 128, (1024, 4096), (400.0, 400.0), (200.0, 200.0), "a paper"),
)


def rate(*, queries, keys, head_size=64, backward=False):
    found = published_rates(
        ROWS,
        head_size=head_size,
        queries=np.array([float(queries)]),
        keys=np.array([float(keys)]),
        backward=backward,
    )
    return float(found[0])


def test_rates_between_lengths_and_head_sizes_are_interpolated_in_logarithms():
    assert rate(queries=1024, keys=1024) == pytest.approx(100)
    assert rate(queries=2048, keys=2048) == pytest.approx(200)
    assert rate(queries=2048, keys=2048, backward=True) == pytest.approx(100)
    assert rate(queries=2048, keys=2048, head_size=90.51) == pytest.approx((200 * 400) ** 0.5, 1e-3)


def test_beyond_the_ends_the_nearest_holds():
    assert rate(queries=100, keys=100) == pytest.approx(100)
    assert rate(queries=9000, keys=9000) == pytest.approx(400)
    assert rate(queries=1024, keys=1024, head_size=32) == pytest.approx(100)
    assert rate(queries=1024, keys=1024, head_size=256) == pytest.approx(400)


def test_a_span_behind_a_prefix_counts_as_the_length_whose_queries_see_as_many_keys():
    # 512 queries up to key 1280 see 1024 on average, as those of 2048 tokens do.
    assert rate(queries=512, keys=1280) == pytest.approx(200, rel=1e-3)


@pytest.mark.parametrize(
    "change", [{"lengths": (2, 1)}, {"forward_flops_per_s": (1.0,)}, {"lengths": (0, 4)}]
)
def test_rows_that_make_no_sense_are_refused(change):
    with pytest.raises(ValueError, match="published_attention of b, head size 64"):
        replace(ROWS[0], **change)


def test_presets_price_the_back_end_that_runs():
    h100 = hardware_for(HardwareConfig(preset="h100"))
    slower = hardware_for(HardwareConfig(preset="h100", attention="flash_attn_2"))
    ask = {"queries": np.array([8192.0]), "keys": np.array([65536.0]), "heads": 32}
    cudnn, flash = (spec.device.attention_flops_per_s("bf16", **ask) for spec in (h100, slower))
    assert 1.7 < float(cudnn[0] / flash[0]) < 2.3
    single = h100.device.attention_flops_per_s("fp32", **ask)
    assert single[0] < h100.device.fp32_flops_per_s


def test_a_back_end_without_figures_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cudnn on a100-80g: .*write one of flash_attn_2"):
        hardware_for(HardwareConfig(preset="a100-80g", attention="cudnn"))
    with pytest.raises(ValueError, match="its rate is not known there; leave the key out$"):
        hardware_for(HardwareConfig(preset="laptop-cpu", attention="cudnn"))
