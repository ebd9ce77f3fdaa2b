"""Directories that token data is written to: new ones, or ones that hold the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sppo.data.chat.template import TEMPLATE_FILE, ChatTemplate
from sppo.data.preparation.row_encoder import Tokenizer
from sppo.data.preparation.token_writer import TokenWriter, move_into_place, temporary_sibling
from sppo.data.preparation.tokenizer_file import FileTokenizer
from sppo.data.tokens import META_FILE, TokenData, open_tokens, verify_tokens
from sppo.output_file import whole_file
from sppo.units import counted


@dataclass(slots=True)
class Destination:
    """Directory that is written beside its place, and moved there when it is complete."""

    out: Path
    temporary: Path
    writer: TokenWriter
    existing: TokenData | None
    """Token data that is there already, and must hold the same tokens; None to write."""
    replaces: bool
    """Whether token data that is there is replaced."""

    def finish(self, tokenizer: Tokenizer, template: ChatTemplate | None, **described: Any) -> None:
        """Write what belongs to the tokens: their description, and the tokenizer's files.

        Args:
            tokenizer: Tokenizer of the data.
            template: Chat template of the data; None if documents are no chats.
            described: Further fields of ``meta.json``.
        """
        if isinstance(tokenizer, FileTokenizer):
            for name, content in tokenizer.files.items():
                _write_file(self.temporary / name, content)
        if template is not None:
            _write_file(self.temporary / TEMPLATE_FILE, template.text.encode())
        self.writer.finish(**described)

    def keep(self) -> None:
        """Move the data to their place, or check that those which are there are equal.

        Raises:
            ValueError: They differ, or the place cannot be written.
        """
        if self.existing is None:
            move_into_place(self.temporary, self.out, replace=self.replaces)
        else:
            _refuse_difference(self.existing, open_tokens(self.temporary))


@contextmanager
def destination(out: Path, tokenizer: Tokenizer, *, force: bool) -> Iterator[Destination]:
    """Yield a destination, of which nothing is left if the body fails.

    Args:
        out: Directory to write, which :func:`.token_writer.check_destination` has accepted.
        tokenizer: Tokenizer of the data.
        force: Replace token data that is there.

    Raises:
        ValueError: The place has tokens of another tokenizer, or cannot be written.
        OSError: The disk is full, or failed.
    """
    existing = None if force or not (out / META_FILE).exists() else open_tokens(out)
    if existing is not None:
        _refuse_other_tokenizer(existing, tokenizer)
    with (
        temporary_sibling(out) as temporary,
        TokenWriter(
            temporary, vocab_size=tokenizer.vocab_size, description=tokenizer.description
        ) as writer,
    ):
        yield Destination(out, temporary, writer, existing, replaces=force)


def _write_file(path: Path, content: bytes) -> None:
    with whole_file(path) as file:
        file.write(content)


_REPLACE = "replace it with --force, or give a new name"


def _refuse_other_tokenizer(existing: TokenData, tokenizer: Tokenizer) -> None:
    """Raise ValueError, before any tokenization, if the existing data has another tokenizer."""
    wanted, there = tokenizer.description, existing.meta.tokenizer
    same = (there.sha256, there.end_of_document) == (wanted.sha256, wanted.end_of_document)
    if existing.vocab_size != tokenizer.vocab_size or not same:
        raise ValueError(
            f"--out {existing.directory}: holds tokens of tokenizer {there.name}, vocabulary"
            f" {existing.vocab_size}, end of document {there.end_of_document}; asked for"
            f" {wanted.name}, {tokenizer.vocab_size}, {wanted.end_of_document}. {_REPLACE}"
        )


def _refuse_difference(existing: TokenData, written: TokenData) -> None:
    same = existing.meta.tokens_sha256 == written.meta.tokens_sha256 and np.array_equal(
        existing.document_offsets, written.document_offsets
    )
    if not same:
        raise ValueError(
            f"--out {existing.directory}: holds other tokens ({existing.num_tokens} in"
            f" {counted(existing.num_documents, 'document')}, not {written.num_tokens} in"
            f" {written.num_documents}); {_REPLACE}"
        )
    if existing.meta.loss_mask_sha256 != written.meta.loss_mask_sha256:
        with_mask = existing.meta.loss_mask_sha256 is not None
        raise ValueError(
            f"--out {existing.directory}: holds these tokens with"
            f" {'another' if with_mask else 'no'} loss mask; {_REPLACE}"
        )
    if existing.meta.chat_template_sha256 != written.meta.chat_template_sha256:
        raise ValueError(
            f"--out {existing.directory}: holds these tokens of another chat template; {_REPLACE}"
        )
    verify_tokens(existing)
