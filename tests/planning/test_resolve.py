import pytest

from sppo.config import check_run
from sppo.kernels.cross_entropy import TILE_BYTES
from sppo.planning.activation_policy import POLICIES
from sppo.planning.memory import memory_of_rank
from sppo.planning.partition import boundaries_by_flops, boundaries_by_length
from sppo.planning.resolve import ELEMENT_BYTES, resolve, sequence_boundaries

PLENTY = 1 << 40


def run_config(*, policy="auto", dtype="bf16", **sequence):
    return check_run(
        {
            "model": {"preset": "tiny"},
            "data": {"tokens": "data"},
            "sequence": {"length": 16384, **sequence},
            "activations": {"policy": policy},
            "train": {"dtype": dtype},
        },
        source="test",
    )


def needed(policy, *, dtype="bf16", longest):
    run = run_config()
    return memory_of_rank(
        run.model,
        length=16384,
        longest=longest,
        policy=policy,
        element_bytes=ELEMENT_BYTES[dtype],
        tile_bytes=TILE_BYTES,
    )


def longest(run):
    cuts = sequence_boundaries(run)
    return max(b - a for a, b in zip(cuts, cuts[1:], strict=False))


def test_the_first_policy_that_fits_is_taken():
    """85 percent of what is available may be used; a byte less and the next policy serves."""
    run = run_config()
    sizes = {p: needed(p, longest=longest(run)).total_bytes for p in POLICIES}
    for policy, following in zip(POLICIES, [*POLICIES[1:], None], strict=True):
        enough = int(sizes[policy] / 0.85) + 2
        chosen = resolve(run, available_bytes=enough)
        assert chosen.policy == policy
        assert chosen.memory == needed(policy, longest=longest(run))
        if following is not None:
            assert resolve(run, available_bytes=enough - 5).policy == following


def test_nothing_that_fits_is_said_with_numbers():
    least = needed("recompute", longest=longest(run_config())).total_bytes
    with pytest.raises(MemoryError, match="16384 tokens needs .* even with.*recompute.*shorten"):
        resolve(run_config(), available_bytes=int(least / 0.85) - 5)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_was_asked_for_is_taken(policy):
    chosen = resolve(run_config(policy=policy), available_bytes=1)
    assert chosen.policy == policy
    assert chosen.memory == needed(policy, longest=longest(run_config()))


def test_fp32_is_predicted_as_fp32():
    run = run_config(dtype="fp32", policy="retain")
    predicted = resolve(run, available_bytes=PLENTY).memory
    assert predicted == needed("retain", dtype="fp32", longest=longest(run))


def test_explicit_boundaries_are_kept():
    cuts = (0, 1, 9000, 16384)
    run = run_config(boundaries=list(cuts))
    assert resolve(run, available_bytes=PLENTY).boundaries == cuts
    assert (
        resolve(run, available_bytes=PLENTY).memory.working_bytes
        == needed("retain", longest=8999).working_bytes
    )


def test_pieces_are_automatic_by_device():
    assert len(sequence_boundaries(run_config())) == 8 + 1
    assert len(sequence_boundaries(run_config(), device="cuda")) == 2 + 1
    assert len(sequence_boundaries(run_config(length=100))) == 1 + 1


def test_partition_by_length_and_alignment():
    run = run_config(partition="length", num_subsequences=3, alignment=1000)
    expected = boundaries_by_length(16384, pieces=3, alignment=1000)
    assert sequence_boundaries(run) == expected == (0, 5000, 11000, 16384)


def test_partition_by_flops_uses_the_model():
    """tiny: 2 layers of 256, two heads of 64 on one key head, MLP 704, vocabulary 257."""
    layer = 256 * (128 + 64 + 64 + 128) + 3 * 256 * 704
    expected = boundaries_by_flops(
        16384,
        pieces=5,
        linear=2 * (2 * layer + 257 * 256),
        quadratic=2 * 4 * 128,
        alignment=128,
    )
    cuts = sequence_boundaries(run_config(num_subsequences=5))
    assert cuts == expected
    assert cuts != boundaries_by_length(16384, pieces=5, alignment=128)
