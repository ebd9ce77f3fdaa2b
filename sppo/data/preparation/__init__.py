"""Preparation of token data: documents, tokenizers, and the writing of token directories."""
