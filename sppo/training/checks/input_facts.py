"""Facts about token data and initial weights that must be the same on all ranks.

Nodes may have copies of the files in different places, e.g. on local disks. The contents must not
differ, or a pipeline would take inputs from one data set and labels from another.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from sppo.config import RunConfig
from sppo.data.tokens import LOSS_MASK_FILE, TOKENS_FILE, TokenData
from sppo.units import KIB

_BLOCK_BYTES = 4 * KIB
_NUM_BLOCKS = 64
_SHOWN_DIGITS = 16


def input_facts(run: RunConfig, data: TokenData) -> dict[str, str]:
    """Return the facts about a rank's inputs that all ranks compare, by name.

    Args:
        run: Validated run configuration.
        data: Token data as this rank reads it.
    """
    meta, tokenizer = data.meta, data.meta.tokenizer
    documents = hashlib.sha256(data.document_offsets.data)
    facts = {
        "data.tokens, tokens": f"{meta.num_tokens} {meta.dtype}",
        "data.tokens, tokens_sha256": meta.tokens_sha256[:_SHOWN_DIGITS],
        "data.tokens, sample of tokens.bin": fingerprint(data.directory / TOKENS_FILE),
        "data.tokens, documents": str(meta.num_documents),
        "data.tokens, starts of documents": documents.hexdigest()[:_SHOWN_DIGITS],
        "data.tokens, vocabulary": str(meta.vocab_size),
        "data.tokens, tokenizer": str(tokenizer.sha256 and tokenizer.sha256[:_SHOWN_DIGITS]),
        "data.tokens, end of document": str(tokenizer.end_of_document),
    }
    if meta.loss_mask_sha256 is not None:
        facts |= {
            "data.tokens, loss_mask_sha256": meta.loss_mask_sha256[:_SHOWN_DIGITS],
            "data.tokens, sample of loss_mask.bin": fingerprint(data.directory / LOSS_MASK_FILE),
        }
    if run.model.from_hf is not None:
        facts |= {
            f"model.from_hf, sample of {file.name}": fingerprint(file)
            for file in sorted(Path(run.model.from_hf).glob("*.safetensors"))
        }
    return facts


def fingerprint(path: Path) -> str:
    """Return a checksum of a file's size and of 64 blocks of 4 KiB spread evenly over it.

    Distinguishes different files of any size, but may miss a few flipped bytes.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for index in range(_NUM_BLOCKS):
            start = max(0, size - _BLOCK_BYTES) * index // (_NUM_BLOCKS - 1)
            digest.update(os.pread(file.fileno(), _BLOCK_BYTES, start))
    return digest.hexdigest()[:_SHOWN_DIGITS]
