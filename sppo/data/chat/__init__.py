"""Conversations as text, with the characters that are trained on."""
