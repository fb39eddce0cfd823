"""The kernels beside the machine's peak: operations and bytes are counted, and peaks are true."""

import platform

import pytest
import torch

from benchmarks.kernels import bench_kernels, measure_peaks

pytestmark = pytest.mark.slow
SIZES = 1 << 16, ((128, 256), (256, 128)), (1, 3), ((1, 64, 96),), ((2, 1, 64),)


def test_each_kernel_s_operations_and_bytes_are_those_of_its_sizes(capsys):
    before = torch.get_num_threads()
    try:
        report = bench_kernels(1, "bfloat16", repeats=1, sizes=SIZES, rounds=1000)
    finally:
        torch.set_num_threads(before)
    rows = {row["kernel"]: row for row in report["results"]}
    counts = {
        name: [row[rate] * row["us"] * 1e3 for rate in ("gop_per_s", "gb_per_s")]
        for name, row in rows.items()
    }
    weights = 2 * 128 * 256
    bits = {"bfloat16": 16, "float32": 32, "int8": 8 + 16 / 128, "int4": 4 + 16 / 32}
    for label in (*bits, "int8+a8", "int4+a8"):
        itemsize = 4 if label == "float32" else 2
        for num_rows in (1, 3):
            own = [
                2 * weights * num_rows,
                weights * bits[label.partition("+")[0]] / 8 + num_rows * itemsize * 2 * (128 + 256),
            ]
            assert counts.pop(f"products, {label}, {num_rows} rows") == pytest.approx(own)
    pairs = sum(range(96 - 64 + 1, 96 + 1))
    for label, head_bytes in (("bfloat16", 2 * 128), ("int8", 128 + 4)):
        own = [4 * 16 * 128 * pairs, 96 * 2 * 8 * head_bytes + 2 * 64 * 16 * 128 * 2]
        assert counts.pop(f"prompt attention, {label} cache, 64 of 96 tokens") == pytest.approx(own)
        own = [4 * 16 * 128 * 2 * 64, 2 * 64 * 2 * 8 * head_bytes + 2 * 2 * 16 * 128 * 2]
        assert counts.pop(f"decode attention, {label} cache, 2 x 64 tokens") == pytest.approx(own)
    assert not counts
    numbers = {name: row["numbers"] for name, row in rows.items()}
    assert numbers["products, int8, 3 rows"] == numbers["products, bfloat16, 1 rows"] == "bfloat16"
    assert numbers["products, int4+a8, 1 rows"] == "integers"
    for row in rows.values():
        assert row["of_peak"] == pytest.approx(row["gop_per_s"] / report["peaks"][row["numbers"]], rel=0.1)
        assert row["of_memory"] == pytest.approx(row["gb_per_s"] / report["peaks"]["memory"], rel=0.1)
    assert len(capsys.readouterr().out.strip().splitlines()) == 2 + len(rows) + 3


def test_a_peak_takes_as_long_as_its_instructions():
    """Otherwise the compiler has computed the loop in advance, and the rate grows with the rounds."""
    few, many = (measure_peaks(3, rounds, 1 << 20) for rounds in (20_000, 200_000))
    for name in ("float32", "bfloat16", "integers"):
        assert many[name] < 4 * few[name], name


@pytest.mark.skipif(platform.machine() != "x86_64", reason="for another compiler's options")
def test_a_processor_without_instructions_for_a_type_has_the_peak_of_float32(monkeypatch):
    monkeypatch.setenv("CXX", "g++ -march=x86-64-v3")
    found = measure_peaks(1, 1000, 1 << 16)
    assert found["bfloat16"] == found["float32"]
    assert found["integers"] != found["float32"]
