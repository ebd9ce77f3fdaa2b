"""Learning rate and weight decay of every parameter: by default, or of a group that matches it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from sppo.config.optimizer import OptimizerConfig
from sppo.cost.parameters import is_decayed
from sppo.quoting import quoted

_SHOWN_NAMES = 3
_NEAR = 0.3


class UpdateRule(NamedTuple):
    """How the optimizer updates a parameter; parameters of one rule are updated together."""

    lr_factor: float
    """Factor of the learning rate of the schedule."""
    weight_decay: float


def update_rule(name: str, config: OptimizerConfig) -> UpdateRule:
    """Return how the optimizer updates a parameter: by the first group whose glob matches it.

    Without a group, and in groups that give no weight decay, matrices and embeddings decay by
    ``weight_decay``, biases and norms do not.
    """
    usual = config.weight_decay if is_decayed(name) else 0.0
    for group in config.groups:
        if fnmatchcase(name, group.match):
            decay = usual if group.weight_decay is None else group.weight_decay
            return UpdateRule(group.lr_factor, decay)
    return UpdateRule(1.0, usual)


def by_update_rule(names: Iterable[str], config: OptimizerConfig) -> dict[UpdateRule, list[str]]:
    """Return the parameters of each rule, in their order."""
    found: dict[UpdateRule, list[str]] = {}
    for name in names:
        found.setdefault(update_rule(name, config), []).append(name)
    return found


def matches_none(glob: str, names: Sequence[str]) -> str:
    """Return words about a glob that matches no parameter: names that are near to it."""
    near = difflib.get_close_matches(glob, names, n=_SHOWN_NAMES, cutoff=_NEAR)
    return (
        f"{quoted(glob)} matches no parameter; near are {', '.join(near or names[:_SHOWN_NAMES])} "
        "(sppo config parameters lists all)"
    )


def check_groups(
    names: Iterable[str], config: OptimizerConfig, *, frozen: Collection[str] = ()
) -> None:
    """Raise ValueError if a group gets no parameter, which is a mistake in its glob or its place.

    Args:
        names: Global names of the parameters that train.
        config: Optimizer configuration with the groups.
        frozen: Global names of the parameters that do not train.

    Raises:
        ValueError: A glob matches no name, or only names that are frozen or that groups before it
            match.
    """
    left = every = list(names)
    for group in config.groups:
        if not any(fnmatchcase(name, group.match) for name in every):
            if any(fnmatchcase(name, group.match) for name in frozen):
                raise ValueError(
                    f"match {quoted(group.match)} matches only parameters that are frozen; leave "
                    "the group out, or train them (sppo config parameters lists what trains)"
                )
            raise ValueError(f"match {matches_none(group.match, every)}")
        kept = [name for name in left if not fnmatchcase(name, group.match)]
        if len(kept) == len(left):
            raise ValueError(
                f"what {quoted(group.match)} matches belongs to groups before "
                "it, for the first match wins: move it up, or leave it out"
            )
        left = kept
