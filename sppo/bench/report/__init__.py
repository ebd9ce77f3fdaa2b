"""Measured rates as tables, plots and a hardware description."""
