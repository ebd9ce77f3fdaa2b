"""Encoding of rows and files in order, in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path

from sppo.data.preparation.row_encoder import RowEncoder
from sppo.data.preparation.rows import Row, holds_rows, read_rows
from sppo.data.preparation.tokenizer_file import FileTokenizer
from sppo.data.preparation.tokenizers import EncodedShard

MOST_WORKERS = 1024
_BATCH_BYTES = 2 << 20
_BATCH_ROWS = 1024
_BATCHES_AHEAD = 2
"""Batches of each worker that are read before the first of them is written."""
_IMPORTED_ONCE = (__name__, "sppo.data.chat.rendering", "tokenizers")
"""Modules that are imported once for all workers; one that is not installed is left out."""


def encoded(
    paths: Sequence[Path], encoder: RowEncoder, *, columns: frozenset[str], workers: int = 1
) -> Iterator[EncodedShard]:
    """Yield the ids of the documents of files in order, whatever the number of workers.

    Args:
        paths: Files in order.
        encoder: What makes ids of rows and files.
        columns: Columns of tables to read.
        workers: Number of processes that encode; 1 encodes in this one.

    Raises:
        ValueError: A file or a row cannot be used.
        MemoryError: A worker was ended.
    """
    batches = _batches(paths, encoder, columns)
    if workers == 1:
        for batch in batches:
            yield from (
                encoder.encode_file(batch) if isinstance(batch, Path) else encoder.encode(batch)
            )
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED_ONCE])
    pool = ProcessPoolExecutor(
        workers,
        mp_context=context,
        initializer=_start,
        initargs=(encoder,),
    )
    try:
        for shards in _in_order(pool, batches, workers * _BATCHES_AHEAD):
            yield from encoder.encode_file(shards) if isinstance(shards, Path) else shards.result()
    except BrokenProcessPool:
        raise MemoryError(
            f"a worker of --workers {workers} was ended, as for lack of memory; use fewer"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, batches: Iterable[list[Row] | Path], ahead: int
) -> Iterator[Future[list[EncodedShard]] | Path]:
    """Yield what becomes of each batch, in order: a file, or the future shards of rows."""
    pending: deque[Future[list[EncodedShard]] | Path] = deque()
    for batch in batches:
        pending.append(batch if isinstance(batch, Path) else pool.submit(_encode, batch))
        if len(pending) > ahead:
            yield pending.popleft()
    yield from pending


def _batches(
    paths: Sequence[Path], encoder: RowEncoder, columns: frozenset[str]
) -> Iterator[list[Row] | Path]:
    """Yield rows of several files together, and files that are one document of any size."""
    batch: list[Row] = []
    batch_bytes = 0
    for path in paths:
        if not isinstance(encoder.tokenizer, FileTokenizer) and not holds_rows(path):
            if batch:
                yield batch
            yield path
            batch, batch_bytes = [], 0
            continue
        for row in read_rows(path, columns=columns):
            batch.append(row)
            batch_bytes += row.source_bytes
            if batch_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_ROWS:
                yield batch
                batch, batch_bytes = [], 0
    if batch:
        yield batch


_encoder: RowEncoder
"""Encoder of a worker process."""


def _start(encoder: RowEncoder) -> None:
    """Set up a worker process, which ends with the process that started it."""
    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what runs at once
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the starting process ends the work
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode(batch: Sequence[Row]) -> list[EncodedShard]:
    return _encoder.encode(batch)
