"""Text output of ``sppo data stats``."""

from __future__ import annotations

from rich.console import Console

from sppo.cli.output.printing import say, table
from sppo.data.samples.length_stats import LengthStats, LimitStats
from sppo.units import counted, format_count, format_tokens


def print_lengths(stats: LengthStats, *, console: Console) -> None:
    """Print percentiles and buckets of document lengths, and the effect of a length limit."""
    percentiles = ", ".join(f"{name} {n:,}" for name, n in stats.length_percentiles.items())
    say(
        console,
        f"{stats.directory}: {counted(stats.num_documents, 'document')}, "
        f"{counted(stats.num_tokens, 'token')} to train on (all but one of each document)",
        f"length: mean {stats.mean_length:,.1f}, {percentiles} tokens",
        _labels_text(stats),
    )
    shares = ("documents", "share", "tokens", "share", "longer documents", "with tokens")
    rows = (
        [
            format_tokens(bucket.up_to),
            f"{bucket.num_documents:,}",
            f"{bucket.documents_share:.2%}",
            format_count(bucket.num_tokens),
            f"{bucket.tokens_share:.2%}",
            f"{bucket.longer_documents_share:.2%}",
            f"{bucket.longer_tokens_share:.2%}",
        ]
        for bucket in stats.buckets
    )
    console.print(table(["up to", *shares], rows, left=0))
    if stats.limit is not None:
        say(console, _limit_text(stats.limit))


def _labels_text(stats: LengthStats) -> str:
    """Return the number of labels that count, and of documents without such labels, as text."""
    if not stats.num_tokens:
        return "no labels: no document has two tokens, so there is nothing to train on"
    counting = "all labels count"
    if stats.has_loss_mask:
        share = stats.num_counting_labels / max(1, stats.num_tokens)
        counting = f"{stats.num_counting_labels:,} of the labels count ({share:.1%})"
    return f"{counting}; documents without any that counts: {stats.num_documents_without_labels:,}"


def _limit_text(limit: LimitStats) -> str:
    """Return the number of documents above the limit, and the samples of an epoch, as text."""
    return (
        f"sequence.length {format_tokens(limit.length)}: longer documents "
        f"{limit.num_longer_documents:,} ({limit.longer_documents_share:.2%}), with "
        f"{limit.longer_tokens_share:.2%} of the tokens; samples of an epoch: "
        f"{limit.num_samples_cut:,} with sequence.longer=cut, {limit.num_samples_drop:,} with drop"
    )
