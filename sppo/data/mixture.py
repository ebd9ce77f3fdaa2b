"""The mixture of a run: the samples and tokens that it draws from each source. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sppo.config import RunConfig
from sppo.data.mixture_order import MixtureOrder
from sppo.data.run_tokens import check_same_vocabulary, open_sources
from sppo.data.samples.run_samples import run_samples
from sppo.data.tokens import TokenData


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDraws:
    """One source of a mixture, and what a run draws from it over ``train.steps``."""

    name: str
    directory: str
    samples: int
    """Number of samples in an epoch: sequences of a stream, or documents and parts of them."""
    tokens: int
    """Number of tokens of these samples."""
    weight: float
    share_asked: float
    """Weight divided by the weights of all sources."""
    share: float
    """Share that the run draws, in the unit of the weights."""
    drawn_samples: int
    """Number of samples that the run draws."""
    drawn_tokens: int
    """Number of tokens that the run draws."""
    epochs: float
    """Drawn samples divided by the samples of an epoch."""
    max_epochs: float


@dataclass(frozen=True, slots=True)
class Mixture:
    """Samples and tokens that a run draws from each of its sources over ``train.steps``."""

    steps: int
    weights: str
    """Unit of the weights: tokens or samples."""
    block: int
    """Number of draws of a block, in each of which every source has the same number of draws."""
    sources: tuple[SourceDraws, ...]


def mixture_of(run: RunConfig, sources: Sequence[TokenData]) -> Mixture:
    """Return what a run with ``data.sources`` draws from each of them.

    Args:
        run: Run configuration.
        sources: Open token data of each source.

    Raises:
        ValueError: Some samples are longer than the run allows, or the weight of a source is too
            small.
    """
    assert run.data.sources is not None, "asked for only of a mixture"
    samples = run_samples(run, sources)
    order, table, steps = samples.order, samples.table, run.train.steps
    assert isinstance(order, MixtureOrder), "the order of a run with sources"
    drawn = order.draws_before(samples.num_consumed(steps))
    tokens = []
    for source, first, draws in zip(order.sources, table.firsts, drawn, strict=True):
        lengths = table.lengths[first : first + source.num_sequences]
        epochs, rest = divmod(draws, source.num_sequences)
        last = source.sequence_indices(draws - rest, rest)
        tokens.append((int(lengths.sum()), epochs * int(lengths.sum()) + int(lengths[last].sum())))
    in_unit = [d for _, d in tokens] if run.data.weights == "tokens" else drawn
    weights = sum(source.weight for source in run.data.sources.values())
    found = tuple(
        SourceDraws(
            name=name,
            directory=config.tokens,
            samples=source.num_sequences,
            tokens=of_epoch,
            weight=config.weight,
            share_asked=config.weight / weights,
            share=own / sum(in_unit),
            drawn_samples=draws,
            drawn_tokens=drawn_tokens,
            epochs=draws / source.num_sequences,
            max_epochs=config.max_epochs,
        )
        for (name, config), source, draws, (of_epoch, drawn_tokens), own in zip(
            run.data.sources.items(), order.sources, drawn, tokens, in_unit, strict=True
        )
    )
    return Mixture(steps, run.data.weights, sum(order.draws), found)


def check_mixture(run: RunConfig) -> None:
    """Raise ValueError unless a run can be trained on its sources together.

    Raises:
        ValueError: The sources are of different vocabularies, the weight of one is too small, or
            the run needs more epochs of some than it allows; lists all of these.
    """
    opened = open_sources(run)
    named = zip(run.data.directories, opened, strict=True)
    # Nobody knows the vocabulary of ready-made ids.
    known = [(key, data) for key, data in named if data.meta.tokenizer.name != "ids"]
    for key, data in known[1:]:
        check_same_vocabulary(data, known[0][1].directory, keys=(key, known[0][0]))
    problems = [
        f"data.sources.{source.name}.max_epochs {source.max_epochs:g}: "
        f"{run.train.steps} steps need {_rounded_up(source.epochs):g} epochs of "
        f"{source.directory}; raise it to that, lower the weight, or train for fewer steps"
        for source in mixture_of(run, opened).sources
        if source.epochs > source.max_epochs
    ]
    if problems:
        raise ValueError("\n".join(problems))


def _rounded_up(value: float) -> float:
    """Return a number that is at least the value, with two decimals."""
    return math.ceil(value * 100) / 100
