"""Notification that a signal handler has run, for watchers that react to unhandled signals."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[], None]] = []


def add_listener(listener: Callable[[], None]) -> None:
    """Call ``listener``, in the main thread, each time that a signal has been handled."""
    _listeners.append(listener)


def remove_listener(listener: Callable[[], None]) -> None:
    """Stop calling ``listener``."""
    _listeners.remove(listener)


def notify_handled() -> None:
    """Notify listeners that all signals so far have been handled; called by signal handlers."""
    for listener in tuple(_listeners):
        listener()
