"""Tells whoever watches that no signal goes unheard which ones a handler has taken."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[], None]] = []


def listen(listener: Callable[[], None]) -> None:
    """Call ``listener`` whenever a handler has taken a signal, in the main thread."""
    _listeners.append(listener)


def stop_listening(listener: Callable[[], None]) -> None:
    """Call ``listener`` no more."""
    _listeners.remove(listener)


def signal_taken() -> None:
    """Say that a signal was heard, and all that arrived before it; for a handler."""
    for listener in tuple(_listeners):
        listener()
