"""Script that runs a command, which the system kills when the parent process ends.

The arguments are the parent's process id and the command, which replaces the script by exec. Linux
keeps the request across exec, so the command itself does nothing; other systems run the command
without the request. The script imports little, because every rank is started by it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when ``parent`` ends; exit if ``parent`` has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that started this rank is gone")


def main() -> None:
    """Run ``end_with_parent.py PID PROGRAM ARGUMENT…``."""
    end_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exec would keep Python's setting to ignore it
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
