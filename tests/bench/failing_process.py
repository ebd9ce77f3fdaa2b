"""Process that fails at once, in a module that imports nothing."""


def fail(rank, *_):
    """Raise what the process that measures messages must tell."""
    raise ValueError("no messages here")
