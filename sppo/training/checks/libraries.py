"""Libraries that every run loads sooner or later, loaded before anyone asks what memory is left.

An optimizer's first step and the plots at the end bring in some 60 MiB. Where a container leaves
little, a plan that did not know of them would have the run killed at the end of its first step.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def load_libraries(*, tensorboard: bool = False) -> None:
    """Load them; takes a second or two, once, which the run would spend later.

    Args:
        tensorboard: also what writes its event files.
    """
    from matplotlib.backends import backend_agg  # noqa: F401

    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter], fused=True).step()
