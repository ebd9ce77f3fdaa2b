"""Functions of ranks in tests of checkpoints: shard a state, save it, load it in other shards."""

import random
from pathlib import Path

import torch
import torch.distributed as dist

from sppo.checkpoint.checkpoint import CheckpointManager
from sppo.checkpoint.state_block import StateBlock


def tensors_of(step):
    """The whole state, as one process would hold it."""
    generator = torch.Generator().manual_seed(step)

    def made(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "model.embed.weight": made(33, 17),
        "model.layers.0.q.weight": made(16, 12),
        "model.layers.0.o.weight": made(12, 16),
        "model.layers.1.norm.weight": made(3),
        "model.layers.1.mlp.weight": made(3, 5),
        "optimizer.exp_avg.embed.weight": made(33, 17, dtype=torch.bfloat16),
        "optimizer.exp_avg_sq.layers.0.o.weight": made(12, 16, dtype=torch.bfloat16),
        "optimizer.nothing": made(0, 4),
        "optimizer.experts": made(4, 5, 6),
        "optimizer.step": torch.tensor(step + 2**40),
    }


# Layouts ----------------------------------------------------------------------------------------


def cut(size, parts):
    """As torch.chunk cuts, but there are always ``parts``; the last ones may be empty."""
    each = -(-size // parts)
    return [(min(i * each, size), min((i + 1) * each, size)) for i in range(parts)]


def box_of(layout, name, shape, *, rank, size):
    """What ``rank`` holds of ``name``; None: nothing of it belongs to this rank."""
    box = [(0, extent) for extent in shape]
    if layout.startswith("random"):
        return random_box(layout + name, shape, rank=rank, size=size)
    if not shape or layout == "whole":
        return box
    if layout == "rows":
        box[0] = cut(shape[0], size)[rank]
    elif layout == "grid":  # two columns as far as there are ranks, replicas on an odd last one
        across = cut(shape[-1], min(size, 2))
        box[-1] = across[rank % len(across)]
        if len(shape) > 1:
            down = cut(shape[0], max(size // 2, 1))
            box[0] = down[rank // 2 % len(down)]
    else:
        raise ValueError(layout)
    return box


def random_box(seed, shape, *, rank, size):
    """Of a random grid with as many cells as there are ranks or fewer, some cells copied."""
    chance = random.Random(f"{seed}/{size}")
    grid, left = [], size
    for extent in shape:
        parts = chance.randint(1, left)
        left //= parts
        inner = sorted(chance.randint(0, extent) for _ in range(parts - 1))
        grid.append(list(zip([0, *inner], [*inner, extent], strict=True)))
    cells = [[]]
    for dimension in grid:
        cells = [[*cell, bounds] for cell in cells for bounds in dimension]
    others = [chance.choice([None, *cells]) for _ in range(size - len(cells))]
    holds = [*cells, *others]
    chance.shuffle(holds)
    return holds[rank]


def place_of(group):
    """Rank and number of ranks."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def cut_state(group, layout, *, step, make=lambda block: block):
    """This rank's part of the state; views of the whole tensors unless ``make`` makes others."""
    return cut_tensors(group, layout, tensors_of(step), make=make)


def cut_tensors(group, layout, tensors, *, make=lambda block: block):
    """This rank's part of ``tensors``."""
    rank, size = place_of(group)
    state = {}
    for name, tensor in tensors.items():
        box = box_of(layout, name, tensor.shape, rank=rank, size=size)
        if box is None:
            continue
        block = make(tensor[tuple(slice(*bounds) for bounds in box)])
        if layout == "whole":
            state[name] = block
        else:
            offsets = tuple(first for first, _ in box)
            state[name] = StateBlock(block, offsets, tuple(tensor.shape))
    return state


def same_bits(one, other):
    """NaN and signed zeros included."""
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)


def tensor_of(value):
    return value.tensor if isinstance(value, StateBlock) else value


# Rank functions ---------------------------------------------------------------------------------


def in_group(rank, function, *arguments):
    """Call a function of the group of all ranks, in the rank pool."""
    del rank
    return function(dist.group.WORLD, *arguments)


def manager_of(group, directory, *, async_save=False):
    path = Path(directory) / "checkpoints"
    return CheckpointManager(path, keep=3, async_save=async_save, group=group)


def save(group, directory, layout, *steps):
    """Save steps; the names there are then."""
    manager = manager_of(group, directory)
    for step in steps:
        manager.save(cut_state(group, layout, step=step), step=step, metadata={"by": layout})
    return names(directory)


def save_layouts(group, directory, layouts):
    """Save step 3 in each layout, in a directory of its name."""
    for layout in layouts:
        save(group, f"{directory}/{layout}", layout, 3)


def load_layouts(group, directory, saved, layouts):
    """Load what was saved in each layout in every other; blocks compared."""
    compared = 0
    for source in saved:
        manager = manager_of(group, f"{directory}/{source}")
        found = manager.latest_valid()
        assert found.step == 3
        assert found.metadata["by"] == source
        for layout in layouts:
            compared += load_and_compare(group, manager, layout, step=3)
    return compared


def load_and_compare(group, manager, layout, *, step):
    """Fill blocks that hold something else; how many were right."""
    found = manager.latest_valid()
    assert found.step == step, found
    state = cut_state(group, layout, step=step, make=lambda block: torch.full_like(block, -1))
    manager.load_into(found, state)
    for name, wanted in cut_state(group, layout, step=step).items():
        got, right = tensor_of(state[name]), tensor_of(wanted)
        assert same_bits(got, right), f"{name} as {layout}"
    return len(state)


def load_newest(group, directory, layout):
    """Load in ``layout``; the step of what was found."""
    manager = manager_of(group, directory)
    found = manager.latest_valid()
    load_and_compare(group, manager, layout, step=found.step)
    return found.step


def load_views(group, directory):
    """Load into columns of larger tensors, which must stay as they were beside them."""
    manager = manager_of(group, directory)
    found = manager.latest_valid()
    for name, tensor in tensors_of(found.step).items():
        if tensor.dim() != 2:
            continue
        rank, size = place_of(group)
        first, last = cut(tensor.shape[1], size)[rank]
        wide = torch.full((tensor.shape[0], last - first + 2), 7.0).to(tensor.dtype)
        block = StateBlock(wide[:, 1:-1], (0, first), tuple(tensor.shape))
        manager.load_into(found, {name: block})
        assert same_bits(block.tensor, tensor[:, first:last])
        assert (wide[:, [0, -1]] == 7).all()


def save_in_background(group, directory):
    """Save while the tensors change and the group is in use; ranks summed meanwhile."""
    manager = manager_of(group, directory, async_save=True)
    sums = []
    for step in (1, 2):
        state = cut_state(group, "grid", step=step, make=torch.clone)
        manager.save(state, step=step, metadata={"by": "grid"})
        for value in state.values():
            tensor_of(value).zero_()
        for _ in range(50):
            total = torch.tensor(dist.get_rank(group))
            dist.all_reduce(total, group=group)
            sums.append(int(total))
    manager.wait()
    load_and_compare(group, manager, "grid", step=2)
    return sums


def names(directory):
    """What lies among the checkpoints."""
    return sorted(path.name for path in (Path(directory) / "checkpoints").iterdir())
