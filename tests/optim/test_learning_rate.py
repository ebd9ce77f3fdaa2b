"""The learning-rate schedule against its closed forms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo.config.optimizer import OptimizerConfig
from sppo.optim.learning_rate import learning_rate


def _rates(total_steps, **fields):
    config = OptimizerConfig.model_validate({"lr": 0.5, **fields})
    return [
        learning_rate(step, config=config, total_steps=total_steps) for step in range(total_steps)
    ]


def test_cosine_without_warmup_is_that_of_torch():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7, eta_min=0.05)
    expected = []
    for _ in range(7):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert _rates(7, schedule="cosine", final_lr_ratio=0.1) == pytest.approx(expected)


def test_linear_reaches_zero_after_the_last_step():
    assert _rates(4, schedule="linear") == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_warmup_starts_at_one_share_and_peaks_once():
    rates = _rates(7, schedule="linear", warmup_steps=4)
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.375, 0.25, 0.125])


def test_constant_after_warmup():
    assert _rates(4, schedule="constant", warmup_steps=2) == [0.25, 0.5, 0.5, 0.5]


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    total=st.integers(1, 60),
    data=st.data(),
    final=st.floats(0, 1),
)
def test_rates_rise_then_fall_between_zero_and_the_peak(schedule, total, data, final):
    warmup = data.draw(st.integers(0, total))
    rates = _rates(total, schedule=schedule, warmup_steps=warmup, final_lr_ratio=final)
    peak = max(warmup - 1, 0)
    assert rates[peak] == 0.5
    assert max(rates) <= 0.5
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    falling = rates[peak:]
    assert all(a >= b - 1e-15 for a, b in zip(falling, falling[1:], strict=False))
    if schedule != "constant" and final < 0.99:  # beyond that rounding decides
        assert rates[-1] > 0.5 * final
        config = OptimizerConfig(
            lr=0.5, schedule=schedule, warmup_steps=warmup, final_lr_ratio=final
        )
        reached = learning_rate(max(total, warmup), config=config, total_steps=total)
        assert reached == pytest.approx(0.5 * final, abs=1e-12)


@pytest.mark.parametrize("decay", ["linear", "sqrt", "cosine"])
def test_wsd_is_that_of_transformers(decay):
    """After warm-up, which theirs begins at the final rate."""
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs = transformers.get_wsd_schedule(
        optimizer,
        num_warmup_steps=3,
        num_stable_steps=11,
        num_decay_steps=6,
        decay_type={"sqrt": "1-sqrt"}.get(decay, decay),
        min_lr_ratio=0.1,
    )
    expected = []
    for _ in range(23):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    wsd = {"schedule": "wsd", "decay": decay, "warmup_steps": 3, "decay_steps": 6}
    config = OptimizerConfig.model_validate({"lr": 0.5, "final_lr_ratio": 0.1, **wsd})
    ours = [learning_rate(step, config=config, total_steps=20) for step in range(23)]
    assert ours[:3] == pytest.approx([0.5 / 3, 1 / 3, 0.5], abs=1e-12)
    assert ours[3:] == pytest.approx(expected[3:], abs=1e-12)
    assert ours[20] == pytest.approx(0.05, abs=1e-12)
    assert ours[14] == 0.5
    assert ours[15] < 0.5


def test_shares_count_steps_of_the_schedule_whatever_the_run_has():
    shares = {"schedule": "wsd", "warmup_steps": "2.5%", "decay_steps": "20%"}
    counts = {"schedule": "wsd", "warmup_steps": 3, "decay_steps": 20}
    whole = _rates(100, **counts)
    assert _rates(100, **shares) == whole
    assert _rates(60, schedule_steps=100, **shares) == whole[:60]
    longer = _rates(103, schedule_steps=100, final_lr_ratio=0.5, schedule="linear")
    assert longer[100:] == [0.25, 0.25, 0.25]


def test_a_branch_that_only_decays_starts_at_the_peak():
    rates = _rates(4, schedule="wsd", decay_steps="100%", decay="linear")
    assert rates == pytest.approx([0.5, 0.375, 0.25, 0.125])
