"""Commands of ``sppo``."""
