"""Labels of tokens: which of them count in the loss."""

IGNORED_LABEL = -100
"""Label of a token whose prediction does not count, as in torch."""
