"""Disks and networks of their own for processes, which some machines let nobody make."""

import shutil
import subprocess
from functools import cache


@cache
def can_isolate() -> bool:
    """Return whether this user may mount a small disk, and make a network, in a namespace."""
    mount = ["unshare", "-rmn", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/tmp"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(mount, capture_output=True).returncode == 0
    )
