"""SPPO: train transformers on sequences that do not fit, cut into subsequences.

Importing this package imports nothing else; see ``README.md`` for the layers.
"""

__version__ = "0.1.0"
