"""Train routers beside transformers: balance loss, z-loss, and the update of choice biases.

transformers' routers return logits and choices; what is added to its loss, or to its biases, is
written out here as the keys of the section ``routing`` say.
"""

import pytest
import torch

from tests.test_deep_hf_training import deep
from tests.test_hf_training import check
from tests.tiers import default_of

pytest.importorskip("transformers")


class Routers:
    """Logits and choices of the routers of a transformers model, one call for each sequence."""

    def __init__(self, model, *, balance_loss=0.0, z_loss=0.0, bias_update=0.0):
        self.balance, self.z, self.amount = balance_loss, z_loss, bias_update
        self.calls = {
            router: []
            for router in model.modules()
            if type(router).__name__.lower().endswith("router")
        }
        for router in self.calls:
            router.register_forward_hook(self._note)

    def _note(self, router, _, output):
        logits, _, chosen = output
        self.calls[router].append((logits, chosen))

    def penalty(self):
        """Return the term beside the mean loss of a step."""
        return sum(
            (self.balance * balance_loss(*call) + self.z * z_loss(call[0])) / len(calls)
            for calls in self.calls.values()
            for call in calls
        )

    @torch.no_grad()
    def after_step(self):
        """Move the biases towards experts that few tokens chose."""
        for router, calls in self.calls.items():
            if self.amount:
                counts = sum(counts_of(*call) for call in calls)
                router.e_score_correction_bias += self.amount * (counts.mean() - counts).sign()
            calls.clear()


def counts_of(logits, chosen):
    return torch.bincount(chosen.flatten(), minlength=logits.shape[-1]).float()


def balance_loss(logits, chosen):
    """X sum_e f_e P_e of one layer and sequence."""
    shares = counts_of(logits, chosen) / len(logits)
    return logits.shape[-1] * (shares * logits.softmax(-1).mean(0)).sum()


def z_loss(logits):
    return logits.logsumexp(-1).square().mean()


LOSSES = {"balance_loss": 0.5, "z_loss": 0.05}
CASES = {
    "one rank": ("qwen3_moe", LOSSES, {}),
    "looped": ("qwen3_moe", LOSSES, {"keys": {"parallel.virtual_stages": 3}}),
    "grid": ("qwen3_moe", LOSSES, {"shape": (2, 2, 2), "cut": "flops", "sequences_per_step": 2}),
    "biases, pieces of units": (
        "glm4_moe",
        {"bias_update": 0.02},
        {"shape": (1, 2, 2), "cut": "even", "keys": {"parallel.multiplexed": "on"}},
    ),
    "biases": ("glm4_moe", {"bias_update": 0.02}, {}),
    "biases, grid": (
        "glm4_moe",
        {"bias_update": 0.02},
        {"shape": (2, 2, 1), "cut": "flops", "sequences_per_step": 2},
    ),
}
"""Family, keys of ``routing``, and the rest of a case."""


@pytest.mark.parametrize("name", default_of(CASES, "grid", "biases, grid"))
def test_routers_train_as_documented(name, ranks, tmp_path):
    family, routing, more = CASES[name]
    keys = {**more.get("keys", {}), **{f"routing.{key}": value for key, value in routing.items()}}

    def beside(model):
        routers = Routers(model, **routing)
        return {"penalty": routers.penalty, "after_step": routers.after_step}

    check(deep(family, **{**more, "keys": keys}), tmp_path, ranks, beside)
