"""Faults of the network between two ranks: closed connections, and packets that vanish."""

import ctypes
import fcntl
import os
import socket
import struct
import threading
import time
from contextlib import AbstractContextManager

from tests.chaos.strike import Strike

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
"""Flags of unshare(2)."""
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
"""Requests of ioctl(2) for the flags of an interface, and the flag of one that is up."""


def cut_connections(strike: Strike) -> None:
    """Shut down every connection of this process to other ranks."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as found:
                is_to_launcher = found.getpeername()[1:] == (int(os.environ["MASTER_PORT"]),)
                if found.family in (socket.AF_INET, socket.AF_INET6) and not is_to_launcher:
                    found.shutdown(socket.SHUT_RDWR)
        except OSError:  # no socket, or one without a peer
            continue


def have_own_network() -> None:
    """Give this process, and the ranks that it starts, a loopback interface of their own.

    A network that was lost is back when ranks start again.
    """
    from sppo.parallel.job import launch

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK | (_NEW_USER if os.getuid() else 0)):
        raise OSError(ctypes.get_errno(), "this machine lets nobody make a network")
    served = launch._served_store

    def served_once_up(num_ranks: int) -> AbstractContextManager[int]:
        _set_loopback(up=True)
        return served(num_ranks)

    launch._served_store = served_once_up


def lose(strike: Strike) -> None:
    """Let all packets between ranks vanish from now on."""
    _set_loopback(up=False)


def lose_for_a_moment(strike: Strike) -> None:
    """Let all packets between ranks vanish for a part of the time that they wait."""

    def return_later() -> None:
        time.sleep(strike.timeout_s / 16)
        _set_loopback(up=True)

    lose(strike)
    threading.Thread(target=return_later, daemon=True).start()


def _set_loopback(*, up: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = b"lo".ljust(16, b"\0")
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, name + bytes(16))
        (flags,) = struct.unpack("H", answer[16:18])
        flags = flags | _UP if up else flags & ~_UP
        fcntl.ioctl(any_socket, _SET_FLAGS, name + struct.pack("H", flags) + bytes(14))
