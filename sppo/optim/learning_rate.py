"""Learning rate schedule as a pure function of the step, without state to save or resume."""

from __future__ import annotations

import math

from sppo.config.run import OptimizerConfig


def learning_rate(step: int, *, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of ``step``, counted from 0.

    Warm-up over w steps gives step t the rate lr (t + 1) / w, so that step 0 already learns and
    step w - 1 has the peak rate. From the peak, step max(w - 1, 0), the cosine and linear schedules
    decay to ``final_lr_ratio`` lr at step ``total_steps``, the first step after the run, and stay
    there. So every step of a run learns, even the last step of a decay to 0. PyTorch's
    CosineAnnealingLR, transformers' schedules and torchtitan (which adds a virtual last step) count
    the same way.

    Factors of lr are, for cosine (Loshchilov and Hutter, 2017, equation 5),
    f + (1 - f) (1 + cos(pi p)) / 2, and for linear 1 - (1 - f) p, where p in [0, 1] is the progress
    of the decay and f the final ratio.
    """
    assert step >= 0, f"step {step}"
    assert total_steps >= 1, f"{total_steps} steps"
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    peak = max(config.warmup_steps - 1, 0)
    if config.schedule == "constant" or total_steps <= peak:
        return config.lr
    progress = min((step - peak) / (total_steps - peak), 1.0)
    return config.lr * _share(config.schedule, progress, final=config.final_lr_ratio)


def _share(schedule: str, progress: float, *, final: float) -> float:
    if schedule == "linear":
        return 1.0 - (1.0 - final) * progress
    assert schedule == "cosine", f"schedule {schedule}"
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
