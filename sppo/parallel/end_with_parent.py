"""Run a command that ends when the process that started it does, however that ends.

Called by its path with the starter's process id and the command, in whose place it then steps.
The wish survives the step, so the command needs to know nothing; it is Linux's, and elsewhere the
command runs without it. Imports little, since every rank passes through here.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent ``parent`` ends; now, if that is over."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that started this rank is gone")


def main() -> None:
    """``end_with_parent.py PID COMMAND WORD…``."""
    end_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and that would pass on
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
