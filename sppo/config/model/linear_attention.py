"""Linear attention of a model: layers that keep a state of fixed size in place of keys."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from sppo.config.base import Section, Width


class LinearAttention(Section):
    """Gated delta rule (Gated DeltaNet, arXiv:2412.06464), as in Qwen3-Next and Qwen3.5.

    Each value head keeps a matrix ``[key_size, value_size]``, to which every token adds what its
    key does not yet find there, after the matrix has decayed.
    """

    key_heads: Width
    """Number of query heads, and of key heads."""
    value_heads: Width
    """Number of value heads; consecutive ones share a query and a key head."""
    key_size: Width = 128
    """Size of a query and of a key."""
    value_size: Width = 128
    """Size of a value."""
    conv_size: int = Field(default=4, ge=2, le=64)
    """Number of tokens that the convolution before the rule reads: the last ones up to a token
    itself."""

    def _broken_rules(self) -> Iterator[str]:
        if self.value_heads % self.key_heads:
            yield (
                f"value_heads {self.value_heads} is not a multiple of key_heads {self.key_heads}: "
                "every key head serves a whole group of value heads"
            )

    @property
    def keys_width(self) -> int:
        """Width of all queries of a token, and of all its keys."""
        return self.key_heads * self.key_size

    @property
    def values_width(self) -> int:
        """Width of all values of a token."""
        return self.value_heads * self.value_size

    @property
    def conv_width(self) -> int:
        """M: number of channels of the convolution: queries, keys and values."""
        return 2 * self.keys_width + self.values_width

    @property
    def inputs_width(self) -> int:
        """Width of the inputs of the recurrence: of the convolution, decays and strengths."""
        return self.conv_width + 2 * self.value_heads

    def of_rank(self, num_ranks: int) -> LinearAttention:
        """Return the heads of one of the ranks that divide the value heads among them.

        Several ranks have the same key head where there are fewer than ranks.
        """
        key_heads, value_heads = (
            max(1, heads // num_ranks) for heads in (self.key_heads, self.value_heads)
        )
        return self.model_copy(update={"key_heads": key_heads, "value_heads": value_heads})

    @property
    def saved_widths(self) -> dict[str, int]:
        """Widths of the projections of a token that a layer saves, by name."""
        return {"linear_inputs": self.inputs_width, "linear_gate": self.values_width}

    @property
    def carried_tokens(self) -> int:
        """Number of tokens before a subsequence that its convolution reads."""
        return self.conv_size - 1
