"""Run a command that ends when the process that started it does, however that ends.

A script, called with the starter's process id and the command, which replaces it by exec. Linux
keeps the request across exec, so the command itself need not do anything; other systems run the
command without it. It imports little, since every rank is started through it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when process ``parent`` ends; exit if that has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that started this rank is gone")


def main() -> None:
    """Run ``end_with_parent.py PID PROGRAM ARGUMENT…``."""
    end_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ignored by Python, and exec would keep that
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
