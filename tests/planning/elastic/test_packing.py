"""Packing of samples: each sample whole and once, cut at the mesh, in shared subsequences."""

from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.planning.elastic.mesh import mesh_of_first_slice, planned_mesh
from sppo.planning.elastic.packing import PADDING, PackedSamples, pack_samples
from sppo.planning.elastic.sample_cost import sample_cost
from sppo.planning.partition import boundaries_by_length, lengths_of
from tests.planning.elastic.samples import LONGEST, lengths_of_samples, workload
from tests.tiers import examples

MODELS = ("llama-3.2-1b", "gpt-7b")


@st.composite
def meshes(draw):
    """(cost, mesh, tokens of the longest sample, ranks that share a subsequence)."""
    degree = draw(st.sampled_from([1, 1, 2, 8]))
    longest = draw(st.one_of(st.integers(degree, 64), st.integers(degree, LONGEST)))
    cost = sample_cost(
        workload(draw(st.sampled_from(MODELS)), degree), most_tokens=2 * max(longest, LONGEST)
    )
    alignment = draw(st.sampled_from([1, 128, 1024]))
    if draw(st.booleans()):
        slices = draw(st.integers(1, min(32, longest // degree)))
        cuts = boundaries_by_length(longest, num_subsequences=slices, alignment=alignment)
        mesh = planned_mesh(cost, lengths_of(cuts), balanced=draw(st.booleans()))
        return cost, mesh, longest, degree
    first = draw(st.integers(max(degree, longest // 32), 2 * longest))
    mesh = mesh_of_first_slice(
        cost,
        longest=longest,
        first=first,
        least=draw(st.integers(degree, first)),
        room=draw(st.integers(first, 2 * first)),
        alignment=min(alignment, first),
    )
    return cost, mesh, longest, degree


@st.composite
def packings(draw):
    """(lengths, packed, mesh, ranks that share a subsequence)."""
    cost, mesh, longest, degree = draw(meshes())
    lengths = draw(lengths_of_samples(longest=longest))
    packed = pack_samples(lengths, cost=cost, mesh=mesh, least_tokens=degree)
    return lengths, packed, mesh, degree


def placed(packed: PackedSamples):
    """(sample, tokens) of all that is packed, padding included."""
    return [
        pair
        for indices, sequence in zip(packed.samples, packed.sequences, strict=True)
        for pair in zip(indices, sequence.samples, strict=True)
    ]


@settings(max_examples=examples(20, all=300))
@given(meshes())
def test_a_mesh_ends_with_the_longest_sample(made):
    _, mesh, longest, degree = made
    assert mesh.ends[-1] == longest
    assert all(a < b for a, b in pairwise((0, *mesh.ends)))
    assert min(mesh.slices[:-1], default=degree) >= degree  # a short last one joins another


@settings(max_examples=examples(25, all=300))
@given(packings())
def test_samples_are_whole_once_and_cut_at_the_mesh(packing):
    lengths, packed, mesh, degree = packing
    samples = [pair for pair in placed(packed) if pair[0] != PADDING]
    assert sorted(samples) == sorted(enumerate(lengths))
    # Padding is for last subsequences that ranks cannot share.
    padding = [tokens for index, tokens in placed(packed) if index == PADDING]
    rests = [
        sum(lengths[index] for index in indices if index != PADDING) - sum(sequence.lengths[:-1])
        for indices, sequence in zip(packed.samples, packed.sequences, strict=True)
    ]
    assert padding == [degree - rest for rest in rests if rest < degree]
    assert packed.padding_tokens == sum(padding)
    counts = [len(sequence.lengths) for sequence in packed.sequences]
    assert counts == sorted(counts, reverse=True)
    for sequence in packed.sequences:
        assert min(sequence.lengths) >= degree
        assert max(sequence.lengths) <= max(mesh.room, degree, *mesh.slices)
        ends = [*accumulate(sequence.lengths)]
        assert tuple(ends[:-1]) == mesh.ends[: len(ends) - 1]
        assert len(ends) == 1 or ends[-2] < sequence.samples[0]
        # No two tails share a subsequence.
        assert all(begin == 0 for parts in sequence.parts() for begin, _ in parts[1:])
        assert sum(len(parts) - 1 for parts in sequence.parts()[:-1]) == 0


@settings(max_examples=examples(15, all=150))
@given(meshes(), st.data())
def test_packing_depends_on_lengths_alone(made, data):
    cost, mesh, longest, degree = made
    lengths = data.draw(lengths_of_samples(longest=longest))
    order = data.draw(st.permutations(range(len(lengths))))

    def pack(order):
        own = [lengths[index] for index in order]
        return pack_samples(own, cost=cost, mesh=mesh, least_tokens=degree)

    packed = pack(range(len(lengths)))
    assert pack(range(len(lengths))) == packed
    assert pack(order).sequences == packed.sequences
