"""What a fault knows of the call that it strikes."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Strike:
    """One strike of a fault in a rank."""

    directory: Path
    """Directory of the run."""
    timeout_s: float
    """``parallel.timeout_s`` of the run."""
    dice: random.Random
    """Source of what the fault draws."""
    arguments: tuple[Any, ...]
    """Positional arguments of the call that is struck."""
