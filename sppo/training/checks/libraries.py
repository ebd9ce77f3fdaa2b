"""Libraries that every run loads sooner or later, loaded before anyone asks what memory is left.

The plots at the end bring in tens of MiB. Where a container leaves little, a plan that did not know
of them would have the run killed when all its steps are done.
"""

from __future__ import annotations

from functools import cache


@cache
def load_libraries(*, tensorboard: bool = False) -> None:
    """Load them; takes a second, once, which the run would spend later.

    Args:
        tensorboard: also what writes its event files.
    """
    from matplotlib.backends import backend_agg  # noqa: F401

    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
