"""A process that fails at once; in a module of its own, which imports nothing."""


def fail(rank: int, *_: object) -> None:
    """Raise what the process that measures messages must tell."""
    raise ValueError("no messages here")
