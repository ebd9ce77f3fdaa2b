"""The version of this package, for everything that writes or compares it."""

__version__ = "0.1.0"
