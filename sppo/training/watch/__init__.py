"""Checks of what a step computed, before its update: values that are not finite, or corrupted."""
