"""Needle documents, which test whether a model finds a value in a long text."""
