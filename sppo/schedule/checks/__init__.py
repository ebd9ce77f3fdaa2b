"""Checks of schedules: completeness, order, messages, and freedom from deadlock."""
