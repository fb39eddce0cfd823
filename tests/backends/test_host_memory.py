"""Memory in large pages, and how much of it there is."""

import math
import mmap
import os
import re
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from nanoengine import LLM
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.host_memory import LARGE_PAGE, available_memory, cpu_quota, zeros_on_large_pages
from nanoengine.backends.kv_cache import KVCache, KVSpec

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
gives_large_pages = SETTING.exists() and "[never]" not in SETTING.read_text()


def large_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes of a tensor are in large pages, according to the system."""
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    num_bytes = 0
    for mapping in mappings[1:]:
        low, high = (int(number, 16) for number in mapping.split()[0].split("-"))
        if low < end and start < high:
            num_bytes += sum(int(n) * 1024 for n in re.findall(r"AnonHugePages: +(\d+) kB", mapping))
    return num_bytes


@pytest.mark.skipif(not gives_large_pages, reason="needs Linux with transparent huge pages")
def test_weights_and_caches_lie_in_large_pages():
    packed = Kernels().pack(torch.randn(3000, 1000))
    cache = KVCache.zeros(KVSpec(4, 64, 64, torch.float32), 200, 32, torch.device("cpu"))
    for tensor in (packed, cache.k, cache.v):
        tensor.fill_(1)
        # Not what is left of the last page: it would take more memory than it holds.
        assert large_bytes(tensor) == tensor.nbytes // LARGE_PAGE * LARGE_PAGE > 0


@pytest.mark.skipif(not SETTING.exists(), reason="needs Linux")
def test_a_cache_takes_memory_only_where_it_is_written():
    resident = psutil.Process().memory_info
    before = resident().rss
    cache = KVCache.zeros(KVSpec(4, 64, 64, torch.float32), 4000, 32, torch.device("cpu"))
    assert cache.k[3999].eq(0).all()
    assert resident().rss - before < cache.k.nbytes / 8
    cache.k[:2000].fill_(1)
    assert cache.k.nbytes / 4 < resident().rss - before < cache.k.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(0,), (3, 5), (1024, 1024, 3), (1 << 22, 1)])
def test_memory_in_large_pages_is_zeros_of_any_shape(shape, dtype):
    zeros = zeros_on_large_pages(shape, dtype)
    assert (zeros.shape, zeros.dtype) == (shape, dtype)
    assert not zeros.any()
    zeros.fill_(1)
    assert zeros.sum(dtype=torch.int64) == zeros.numel()


def test_without_large_pages_memory_is_still_zeroed(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not zeros_on_large_pages((1024, 1024), torch.float32).any()


def test_allocating_more_memory_than_there_is_raises_a_runtime_error():
    for size in (1 << 50, 1 << 62):
        with pytest.raises(RuntimeError):
            zeros_on_large_pages((size,), torch.int8)


GIB = 2**30


def lay_out(root, controller, groups):
    """Write cgroup files as the system shows them: of each version and group, the contents by name."""
    memberships = ["5:devices:/x", "4:cpuset:/a/b"]
    for (version, path), files in groups.items():
        memberships.append("0::/a/b" if version == 2 else f"3:{controller},cpuacct:/a/b")
        folder = root / "sys/fs/cgroup" / ("" if version == 2 else controller) / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / f"{controller}.{name}").write_text(f"{content}\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(memberships) + "\n")


def memory_files(version, limit, used, cached, *high):
    """Return the files of a group with these numbers, in GiB."""
    names = ("max", "current", "high") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    sizes = zip(names, (limit, used, *high), strict=False)
    start = "" if version == 2 else "total_"
    stat = f"anon 5\n{start}inactive_file {int(cached * GIB)}\n{start}active_file 0"
    return {name: x if x == "max" else int(x * GIB) for name, x in sizes} | {"stat": stat}


@pytest.mark.parametrize(
    ("groups", "left", "limit"),
    [
        ({}, 100, ""),
        *(({(version, "a/b"): (4, 1, 0)}, 3, "limit is 4.0") for version in (1, 2)),
        *(({(version, "a/b"): (4, 3, 2)}, 3, "limit is 4.0") for version in (1, 2)),  # 2 are cached files
        ({(2, "a/b"): ("max", 1, 0), (2, "a"): (8, 6, 0)}, 2, "limit is 8.0"),  # the parent's limit
        ({(2, "a/b"): (5, 1, 0), (2, "a"): (8, 6, 0), (1, "a/b"): (3, 2, 0)}, 1, "limit is 3.0"),
        ({(1, ""): (2, 0.5, 0)}, 1.5, "limit is 2.0"),  # in a container: its group's folder is the base
        ({(2, "a/b"): (1, 2, 0)}, 0, "limit is 1.0"),
        ({(2, "a/b"): (2**33, 1, 0)}, 100, ""),  # far above what the machine has
        *(({(2, "a/b"): (4, 1, 0), (2, x): (4, 1, 0, 3)}, 2, "memory.high is 3.0") for x in ("a/b", "a", "")),
        *(({(2, "a/b"): (4, 1, 0, high)}, 3, "limit is 4.0") for high in ("max", 6)),
        ({(2, "a/b"): (4, 1, 0, 0.5)}, 0, "memory.high is 0.5"),
    ],
)
def test_available_memory_is_the_least_of_machine_and_cgroups(groups, left, limit, tmp_path, monkeypatch):
    lay_out(tmp_path, "memory", {group: memory_files(group[0], *sizes) for group, sizes in groups.items()})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB))
    found = available_memory(tmp_path)
    assert found.num_bytes == left * GIB
    assert found.limit == (limit and f"the cgroup's {limit} GiB")
    assert str(found) == f"{left:.1f} GiB available" + (found.limit and f" ({found.limit})")


def test_the_cache_takes_half_of_what_is_available_and_no_more_can_be_asked_for(monkeypatch, caplog):
    lean = available_memory()._replace(num_bytes=200 << 20, limit="a reason")
    monkeypatch.setattr("nanoengine.backends.device.available_memory", lambda: lean)
    with LLM("demo", max_model_len=1 << 10, max_num_seqs=1 << 10) as llm:
        taken = sum(cache.k.nbytes + cache.v.nbytes for cache in llm.llm_engine.runner.caches)
        assert 99 << 20 < taken <= 100 << 20
        assert caplog.messages[-1].endswith(", 0.1 GiB of the 0.2 GiB available (a reason)")
    with LLM("demo", kv_cache_bytes=150 << 20):
        assert "available" not in caplog.messages[-1]
    for size in ({"kv_cache_bytes": 201 << 20}, {"num_kv_blocks": 1 << 20}):
        with pytest.raises(ValueError, match=r"0.2 GiB available \(a reason\); lower num_kv_blocks"):
            LLM("demo", **size)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize(("kind", "used"), [("AS", "vms"), ("DATA", "data")])
def test_limits_of_the_process_bound_the_available_memory(kind, used):
    import resource

    name = getattr(resource, f"RLIMIT_{kind}")
    before = resource.getrlimit(name)
    limit = getattr(psutil.Process().memory_info(), used) + (512 << 20)
    resource.setrlimit(name, (limit, before[1]))
    try:
        found = available_memory()
        assert 500 << 20 < found.num_bytes < 513 << 20  # the process may have freed some since
        assert found.limit.startswith(f"RLIMIT_{kind} is ")
        if kind == "AS":  # without the bound, the cache of 10,000 sequences would need more addresses
            with LLM("demo", max_num_seqs=10_000) as llm:
                cache = sum(one.k.nbytes + one.v.nbytes for one in llm.llm_engine.runner.caches)
                assert cache <= 256 << 20
                llm.generate("Hello", use_tqdm=False)
    finally:
        resource.setrlimit(name, before)


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({}, math.inf),
        ({(2, "a/b"): ("max", 100_000)}, math.inf),
        ({(1, "a/b"): (-1, 100_000)}, math.inf),
        ({(2, "a/b"): (150_000, 100_000)}, 1.5),
        ({(1, "a/b"): (150_000, 100_000)}, 1.5),
        ({(2, "a/b"): (5_000, 10_000), (2, "a"): ("max", 100_000)}, 0.5),
        ({(2, "a/b"): (400_000, 100_000), (2, "a"): (200_000, 100_000)}, 2),  # the parent's quota
        ({(1, "a/b"): (400_000, 100_000), (1, ""): (300_000, 100_000)}, 3),
        ({(1, ""): (300_000, 100_000)}, 3),  # in a container: its group's folder is the base
        ({(2, "a/b"): (400_000, 100_000), (1, "a"): (200_000, 100_000)}, 2),
    ],
)
def test_the_cpu_quota_is_the_least_of_the_cgroups_up_to_the_root(quotas, expected, tmp_path):
    files = {
        group: {"max": f"{quota} {period}"}
        if group[0] == 2
        else {"cfs_quota_us": quota, "cfs_period_us": period}
        for group, (quota, period) in quotas.items()
    }
    lay_out(tmp_path, "cpu", files)
    assert cpu_quota(tmp_path) == expected


@contextmanager
def cgroup(kind, limits):
    """Make a cgroup with one of these limits. Yields a function that runs a script in it."""
    bases = map(Path, (f"/sys/fs/cgroup/{kind}", "/sys/fs/cgroup"))
    group = next((x for x in bases if x.exists()), Path("/nowhere")) / "nanoengine-test"

    def run(script, **environment):
        join = f"import os; print(os.getpid(), file=open({str(group / 'cgroup.procs')!r}, 'w'), flush=True)"
        others = {key: x for key, x in os.environ.items() if key != "OMP_NUM_THREADS"}
        command = [sys.executable, "-c", f"{join}\n{script}"]
        return subprocess.run(command, env=others | environment, capture_output=True, text=True, timeout=300)

    try:
        try:
            group.mkdir()
            name = next(name for name in limits if (group / name).exists())
            (group / name).write_text(limits[name])
        except (OSError, StopIteration):
            pytest.skip(f"no right to make a cgroup with a limit of {kind} here")
        yield run
    finally:
        with suppress(OSError):
            group.rmdir()


@pytest.mark.slow
def test_in_a_real_cgroup_there_are_as_many_threads_as_its_quota_allows():
    start = "import torch; torch.set_num_threads(os.cpu_count()); from nanoengine import LLM\n"
    script = start + "LLM('demo', num_kv_blocks=9).close(); print(torch.get_num_threads())"
    all_cpus = str(os.cpu_count())
    with cgroup("cpu", {"cpu.max": "150000 100000", "cpu.cfs_quota_us": "150000"}) as run:
        for given, expected in (({}, "1"), ({"OMP_NUM_THREADS": all_cpus}, all_cpus)):
            done = run(script, **given)
            assert done.stdout.strip() == expected
            assert ("1 thread for a CPU quota of 1.5" in done.stderr) == (not given)


@pytest.mark.slow
def test_in_a_real_cgroup_the_cache_is_sized_by_its_limit():
    sizes = "num_kv_blocks=9", "max_num_seqs=10_000", "num_kv_blocks=200_000"
    script = "from nanoengine import LLM\n" + "; ".join(f"LLM('demo', {size}).close()" for size in sizes)
    with cgroup("memory", dict.fromkeys(("memory.max", "memory.limit_in_bytes"), str(GIB))) as run:
        said = run(script).stderr
    assert re.search(r"0\.[234] GiB of the 0\.[3-9] GiB available \(the cgroup's limit is", said)
    assert "ValueError: too little memory for a KV cache of 200000 blocks" in said
