"""The label of tokens that do not count in the loss."""

IGNORED_LABEL = -100
"""Label of a token whose prediction does not count in the loss, as in torch."""
