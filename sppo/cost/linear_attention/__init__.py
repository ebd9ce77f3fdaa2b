"""Costs of linear attention: of its rule and of its states."""
