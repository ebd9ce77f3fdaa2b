"""Training data of a run: its opening, and checks that all ranks have the same, with labels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from sppo.config import RunConfig
from sppo.data.sample_rows import TrainingData
from sppo.data.tokens import LOSS_MASK_FILE, TOKENS_FILE, TokenData, open_tokens
from sppo.units import KIB


def training_data(run: RunConfig) -> TrainingData:
    """Open the training data of a run, whose token files were checked before.

    Raises:
        ValueError: The data is missing or damaged, or has samples longer than the run allows.
    """
    return TrainingData.of(run, open_tokens(Path(run.data.tokens)))


def check_labels(training: TrainingData, *, steps: int) -> None:
    """Raise ValueError if no step has a valid label; stops at the first step that has one."""
    tokens = training.data
    if tokens.loss_mask is None and not training.isolate_documents:
        return
    if any(map(training.has_labels, _places_of_steps(training, steps=steps))):
        return
    fix = (
        "Prepare the data again, with a loss mask that is true for what is to be learnt"
        if tokens.loss_mask is not None
        else "Set data.isolate_documents=false, or prepare longer documents"
    )
    raise ValueError(
        f"{training.why_no_labels(0)}, and so it is in every step: there is nothing to learn "
        f"from. {fix}"
    )


def _places_of_steps(training: TrainingData, *, steps: int) -> Iterator[int]:
    """Yield the position at which each step of a run begins, for at most one epoch.

    Yields nothing if every document is a single token, so that no sample has a label.
    """
    position = 0
    for _ in range(steps):
        if (
            position >= training.num_samples
            or training.data.num_documents >= training.data.num_tokens
        ):
            return
        yield position
        position += len(training.step_samples(position))


_BLOCK_BYTES = 4 * KIB
_NUM_BLOCKS = 64
_SHOWN_DIGITS = 16


def input_facts(run: RunConfig, data: TokenData) -> dict[str, str]:
    """Return the facts about a rank's inputs that all ranks compare, by name."""
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
