"""Training data of a run: its opening, and checks that all ranks have the same, with labels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from sppo.config import RunConfig
from sppo.data.run_tokens import samples_of
from sppo.data.samples.document_samples import DocumentSamples
from sppo.data.sequences import TrainingData
from sppo.data.tokens import LOSS_MASK_FILE, TOKENS_FILE, TokenData, open_tokens
from sppo.parallel.job.rendezvous import difference_report
from sppo.training.job import Job
from sppo.units import KIB


def training_data(run: RunConfig) -> TrainingData | DocumentSamples:
    """Open the training data of a run, whose token files were checked before.

    Raises:
        ValueError: The data is missing or damaged, or has samples longer than the run allows.
    """
    tokens = open_tokens(Path(run.data.tokens))
    if run.data.samples == "documents":
        return DocumentSamples(
            samples_of(run, tokens),
            tokens,
            seed=run.train.seed,
            shuffle=run.data.shuffle,
            samples_per_step=run.train.samples_per_step,
            tokens_per_step=run.train.tokens_per_step,
        )
    return TrainingData(
        tokens,
        length=run.sequence.length,
        sequences_per_step=run.train.sequences_per_step,
        seed=run.train.seed,
        shuffle=run.data.shuffle,
        isolate_documents=run.data.isolate_documents,
    )


def check_labels(training: TrainingData | DocumentSamples, *, steps: int) -> None:
    """Raise ValueError if no step has a valid label; stops at the first step that has one."""
    tokens = training.data
    isolates = isinstance(training, TrainingData) and training.isolate_documents
    if tokens.loss_mask is None and not isolates:
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


def _places_of_steps(training: TrainingData | DocumentSamples, *, steps: int) -> Iterator[int]:
    """Yield the position at which each step of a run begins, for at most one epoch.

    The position is a sample, or the number of a step of sequences. Yields nothing if every document
    of the token stream is a single token, whose sequences have no labels.
    """
    if isinstance(training, DocumentSamples):
        position = 0
        for _ in range(steps):
            if position >= training.num_samples:
                return
            yield position
            position += len(training.step_samples(position))
    elif training.data.num_documents < training.data.num_tokens:
        epoch = -(-training.num_sequences // training.sequences_per_step)
        yield from range(min(steps, epoch))


_BLOCK_BYTES = 4 * KIB
_NUM_BLOCKS = 64
_SHOWN_DIGITS = 16


def check_same_inputs(job: Job, data: TokenData) -> None:
    """Raise ValueError unless all ranks read the same inputs. Collective.

    Args:
        job: Job that trains the run.
        data: Token data as this rank reads it.

    Raises:
        ValueError: On every rank; names the ranks and facts that differ, with both values.
    """
    if job.ranks.mesh.is_distributed:
        report = difference_report(job.ranks.peers.all_gather(input_facts(job.run, data)))
        if report:
            raise ValueError(report)


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
