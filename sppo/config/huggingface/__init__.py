"""Hugging Face configurations, read and written."""
