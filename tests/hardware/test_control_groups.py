"""Control groups that limit memory, of both versions: their limits, and what is left."""

from sppo.hardware.control_groups import memory_limits

GIB = 1 << 30


def group_v2(path, *, limit, current, files=0):
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{current}\n")
    (path / "memory.stat").write_text(f"anon 1\nactive_file {files}\ninactive_file {files}\n")


def group_v1(path, *, limit, current, files=0):
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (path / "memory.usage_in_bytes").write_text(f"{current}\n")
    stat = f"active_file 7\ntotal_active_file {files}\ntotal_inactive_file {files}\n"
    (path / "memory.stat").write_text(stat)


def found(tmp_path, membership):
    """Limit of each group, and what is left."""
    (tmp_path / "membership").write_text(membership)
    return [*memory_limits(membership=tmp_path / "membership", cgroups=tmp_path / "cgroup")]


def test_all_groups_above_the_process_count(tmp_path):
    top = tmp_path / "cgroup"
    group_v2(top / "a/b/c", limit="max", current=5 * GIB)
    group_v2(top / "a/b", limit=8 * GIB, current=6 * GIB, files=GIB // 2)
    group_v2(top / "a", limit=6 * GIB, current=4 * GIB)
    group_v2(top / "other", limit=1, current=0)
    assert found(tmp_path, "0::/a/b/c\n") == [(8 * GIB, 3 * GIB), (6 * GIB, 2 * GIB)]
    (top / "a/memory.stat").unlink()
    assert found(tmp_path, "0::/a\n") == [(6 * GIB, None)]


def test_groups_of_version_1(tmp_path):
    top = tmp_path / "cgroup/memory"
    group_v1(top, limit=9223372036854771712, current=5 * GIB)
    group_v1(top / "job", limit=4 * GIB, current=3 * GIB, files=GIB // 4)
    membership = "8:pids:/job\n4:cpu,memory:/job\n0::/\n"
    assert found(tmp_path, membership) == [(4 * GIB, GIB + GIB // 2)]
    assert found(tmp_path, "4:memory:/\n0::/\n") == []


def test_a_container_sees_its_own_group_at_the_top(tmp_path):
    group_v1(tmp_path / "cgroup/memory", limit=4 * GIB, current=GIB)
    assert found(tmp_path, "4:memory:/path/on/the/host\n") == [(4 * GIB, 3 * GIB)]


def test_no_groups_no_limit(tmp_path):
    assert found(tmp_path, "0::/a\n") == []
    assert [*memory_limits(membership=tmp_path / "none")] == []
