"""Commands of ``sppo config``."""

from sppo.cli.config.commands import app

__all__ = ["app"]
