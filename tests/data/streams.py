"""Token data without files, and the training data of its samples."""

from pathlib import Path

import numpy as np

from sppo.data.order import SequenceOrder
from sppo.data.sample_rows import TrainingData
from sppo.data.samples.sample_table import sample_table, stream_table
from sppo.data.tokens import TokenData, TokenizerDescription, TokenMeta


def stream_of(lengths, *, max_id=None, loss_mask=None):
    """Documents of the given lengths; the token at position p of the stream is p."""
    tokens = np.arange(sum(lengths), dtype=np.uint32)
    meta = TokenMeta(
        format_version=1,
        dtype="uint32",
        vocab_size=len(tokens),
        max_id=len(tokens) - 1 if max_id is None else max_id,
        num_tokens=len(tokens),
        num_documents=len(lengths),
        tokens_sha256="",
        tokenizer=TokenizerDescription(name="ids", end_of_document=None),
    )
    return TokenData(
        directory=Path("tokens"),
        meta=meta,
        tokens=tokens,
        document_offsets=np.cumsum([0, *lengths]),
        loss_mask=None if loss_mask is None else np.array(loss_mask, dtype=np.uint8),
    )


def sequences_of(data, length, **options):
    """Sequences of ``length`` tokens cut from the stream, one in a step unless told otherwise."""
    table = stream_table(data.num_tokens, length=length)
    return _training(table, data, **{"samples_per_step": 1, "shuffle": False, **options})


def documents_of(lengths, *, length=12, loss_mask=None, **options):
    """Documents of the given lengths as samples."""
    data = stream_of(lengths, loss_mask=loss_mask)
    table = sample_table(data.document_offsets, length=length, longer="cut")
    return _training(table, data, **options)


def _training(table, data, *, shuffle=True, **options):
    order = SequenceOrder(table.num_samples, seed=7, shuffle=shuffle)
    return TrainingData(table, order, (data,), **options)
