"""Commands of ``sppo data``."""

from sppo.cli.data.commands import app

__all__ = ["app"]
