"""Quoting of user values in messages: one line, bounded length, no control characters."""

from __future__ import annotations

from reprlib import Repr

QUOTE_CHARACTERS = 80
"""Upper bound on the characters of one quoted value."""

_LINE_CHARACTERS = 2000
_DOTS = "..."
_QUOTED_LEVELS = 3
_QUOTED_ITEMS = 20


class _BoundedRepr(Repr):
    """`repr` that stops early, so that deep, long and huge values cost no time and no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = _QUOTED_LEVELS
        self.maxstring = self.maxother = self.maxlong = QUOTE_CHARACTERS
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = _QUOTED_ITEMS

    def repr_int(self, x: int, level: int) -> str:
        """Describe whole numbers of too many digits, which Python refuses to convert to text."""
        bits = x.bit_length()
        if bits > 4 * QUOTE_CHARACTERS:
            return f"a whole number of {int(bits * 0.30103) + 1} digits"
        return super().repr_int(x, level)


_repr = _BoundedRepr()


def quoted(value: object) -> str:
    """Return the Python spelling of `value`, cut in the middle to :data:`QUOTE_CHARACTERS`."""
    return one_line(_repr.repr(value))


def one_line(text: object, *, most: int = QUOTE_CHARACTERS) -> str:
    """Return `text` with control characters escaped, cut in the middle to `most` characters."""
    whole = str(text)
    # Escaping never shortens text, so both ends of a long one suffice.
    escaped = _escaped(whole if len(whole) <= 2 * most else whole[:most] + whole[-most:])
    if len(escaped) <= most:
        return escaped
    head = most * 2 // 3
    return f"{escaped[:head]}{_DOTS}{escaped[head + len(_DOTS) - most :]}"


def readable(message: str) -> str:
    """Return `message` with its line breaks kept and :func:`one_line` applied to each line.

    A second bound besides the bound on each value, because a message may include text of a library
    that quotes its whole input.
    """
    return "\n".join(one_line(line, most=_LINE_CHARACTERS) for line in message.split("\n"))


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
