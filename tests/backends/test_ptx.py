"""Triton's kernels, compiled for GPUs and executed by docs/ptx.py, which needs no GPU."""

import functools
import re
from pathlib import Path

import pytest
import torch

from docs.ptx import Cta, Fault, GlobalMemory, Kernel
from nanoengine.backends import triton_attention as backend
from tests.attention import ALL_DECODES, MIXED, SINKS, SLOPES, case_id, check_attention
from tests.helpers import slow
from tests.launches import MUTATIONS, Emulated, compile_launch, obstacle

if reason := obstacle():
    pytest.skip(reason, allow_module_level=True)

KERNELS = "_attend_kernel", "_combine_kernel", "_write_kv_kernel"
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
BATCH = [(1, 100), (3, 3), (20, 90)]
ALL = {"window": 70, "softcap": 2.0, "sinks": SINKS.repeat(2), "alibi_slopes": SLOPES.repeat(2)}
EDGES = [(1, 200), (1, 192), (1, 64), (22, 112), (3, 3)]  # splits of 64; a tile has 21 tokens
NO_POWERS_OF_2 = {"heads": 6, "head_dim": 24, "v_head_dim": 20}


def execute(generation, lens, dtype, max_programs=None, **settings):
    """Check attention computed by emulated kernels. Splits are small, a program computes several of them, and
    memory that has not been written is NaN.
    """
    emulated = [Emulated(getattr(backend, name), generation) for name in KERNELS]
    with pytest.MonkeyPatch.context() as patch:
        for name, kernel in zip(KERNELS, emulated, strict=True):
            patch.setattr(backend, name, kernel)
        patch.setattr(backend, "generation", lambda device: generation)
        patch.setattr(backend, "MIN_SPAN", 64)
        patch.setattr(backend, "MAX_PROGRAMS", max_programs or 2 * len(lens))
        unwritten = functools.partial(torch.full, fill_value=torch.nan)
        patch.setattr(torch, "empty", lambda *shape, **kwargs: unwritten(shape, **kwargs))
        patch.setattr(torch.Tensor, "new_empty", lambda x, *shape: unwritten(shape, dtype=x.dtype))
        settings = {"block_size": 16, "heads": 8, "head_dim": 64, "stale": torch.nan, **settings}
        check_attention(backend.TritonAttention, lens, dtype=dtype, **settings)
    return emulated


IN_BLOCKS = {"block_size": 32, "head_dim": 128}  # a tile of keys is in one block
WIDE, NARROW, ODD = {"head_dim": 256}, {"head_dim": 24, "v_head_dim": 16}, {"head_dim": 80, "heads": 6}
SHARED, OF_128 = {"heads": 71, "kv_heads": 1}, {"head_dim": 128}
CASES = [
    ("sm90", [(1, 200), (1, 31)], HALF, ALL),
    ("sm80", EDGES, BRAIN, NO_POWERS_OF_2),
]
SLOW_CASES = [
    ("sm75", [(1, 100), (3, 3)], HALF, {}),
    ("sm90", EDGES, BRAIN, IN_BLOCKS),
    *(("sm80", BATCH, dtype, {}) for dtype in (BRAIN, FULL)),
    *(("sm80", EDGES, BRAIN, x) for x in ({**NO_POWERS_OF_2, "window": 70}, SHARED, {**IN_BLOCKS, **ALL})),
    ("sm90", EDGES, BRAIN, {**IN_BLOCKS, "block_size": 64}),
    *(("sm75", MIXED, HALF, settings) for settings in (OF_128, ALL)),
    *(("sm80", ALL_DECODES, BRAIN, settings) for settings in (OF_128, ALL)),
    *(("sm89", BATCH, FULL, settings) for settings in (OF_128, ALL)),
    *(("sm90", MIXED, BRAIN, settings) for settings in (OF_128, ALL)),
    *(("sm75", BATCH, HALF, settings) for settings in ({}, IN_BLOCKS, WIDE, SHARED)),
    *(("sm90", BATCH, HALF, settings) for settings in (WIDE, NARROW, ODD, {"block_size": 3, "kv_heads": 8})),
]


@pytest.mark.parametrize(
    ("generation", "lens", "dtype", "settings"), [*CASES, *slow(*SLOW_CASES)], ids=case_id
)
def test_what_triton_compiles_for_a_gpu_equals_dense_attention(generation, lens, dtype, settings):
    execute(generation, lens, dtype, **settings)


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("widths", [(3, 16, 16), (2, 24, 16), (1, 11, 7)])
def test_compiled_code_writes_keys_and_values_to_their_slots_and_nowhere_else(dtype, widths, monkeypatch):
    monkeypatch.setattr(backend, "_write_kv_kernel", Emulated(backend._write_kv_kernel, "sm80"))
    heads, *dims = widths
    qkv = torch.randn(5, 48 + heads * sum(dims)).to(dtype)
    kv = [x.unflatten(1, (heads, -1)) for x in qkv[:, 48:].split([heads * dim for dim in dims], dim=1)]
    caches = [torch.randn(4, 4, heads, dim).to(dtype) for dim in dims]
    expected, slots = [cache.clone() for cache in caches], torch.tensor([9, 0, 15, 4, 6])
    for cache, x in zip(expected, kv, strict=True):
        cache.flatten(0, 1)[slots] = x
    backend.write_kv(*caches, *kv, slots)
    assert all(map(torch.equal, caches, expected))
    for too_far in ([9, 16, 15, 4, 6], [9, -1, 15, 4, 6]):
        with pytest.raises(Fault, match="outside of every tensor"):
            backend.write_kv(*caches, *kv, torch.tensor(too_far))
    with pytest.raises(Fault, match="race: this launch stores the same"):
        backend.write_kv(*caches, *kv, torch.tensor([9, 9, 15, 4, 6]))


PTX = """.visible .entry kernel(
	.param .u64 .ptr .global kernel_param_0,
	.param .u64 .ptr .global kernel_param_1
)
.reqntid 64
{{
	.reg .pred %p<4>; .reg .b16 %rs<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
	ld.param.b64 %rd1, [kernel_param_0];
	ld.param.b64 %rd2, [kernel_param_1];
	mov.u32 %r1, %tid.x;
	mad.wide.u32 %rd3, %r1, 4, %rd1;
	mad.wide.u32 %rd4, %r1, 4, %rd2;
	shl.b32 %r2, %r1, 2;
	xor.b32 %r3, %r2, 128;
	setp.lt.u32 %p1, %r1, 32;
	{body};
$end:
	ret;
"""


def run_ptx(*body):
    """Run 64 threads. Thread i has i in %r1, 4i in %r2, (4i) ^ 128 in %r3, and i < 32 in %p1. %rd3 is the
    address of its input, which is i, and %rd4 of its output.
    """
    source, out = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    memory = GlobalMemory([(source, True), (out, True)])
    kernel = Kernel(PTX.format(body=";\n\t".join(body)), shared=256)
    Cta(kernel, memory, memory.addresses, (0, 0, 0), (1, 1, 1)).run()
    memory.copy_back()
    return out


STORE, BARRIER, LOAD_OTHER = "st.shared.b32 [%r2], %r1", "bar.sync 0", "ld.shared.b32 %r4, [%r3]"
LOAD_NEXT = "xor.b32 %r3, %r2, 4", "ld.shared.b32 %r4, [%r3]"
COPY = "cp.async.ca.shared.global [%r2], [%rd3], 0x4, 4", "cp.async.commit_group"
WAIT, LOAD, SYNC = "cp.async.wait_group 0", "ld.shared.b32 %r4, [%r2]", "bar.warp.sync -1"
READS_AFTER_WRITES = [[STORE, LOAD_OTHER], [STORE, SYNC, LOAD_OTHER], [STORE, *LOAD_NEXT]]
READS_AFTER_WRITES += [[*COPY, BARRIER, WAIT, LOAD_OTHER]]
WRITES_AFTER_READS = [[STORE, BARRIER, LOAD_OTHER, STORE], [STORE, SYNC, *LOAD_NEXT, STORE]]
LOAD_FIRST = "ld.shared.b32 %r4, [0]"  # by both warps, then again by one
WRITES_AFTER_READS += [
    [STORE, BARRIER, LOAD_FIRST, *again, SYNC, STORE] for again in ((), (f"@%p1 {LOAD_FIRST}",))
]
TOO_EARLY = [LOAD], [BARRIER, LOAD_OTHER], [STORE], ["cp.async.wait_group 1", LOAD]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (["add.sat.s32 %r4, %r1, %r1"], r"unknown opcode add\.sat\.s32 in line 16"),
        (["add.s32 %r4, %r5, %r1"], "%r5 is read before it is written, in line 16"),
        (["add.s64 %rd5, %rd3, %r1"], "%r1 has another size"),
        (["ld.global.b32 %r4, [%rd3 + 4]"], "outside of every tensor"),
        (["st.global.b32 [%rd4 + -4], %r1"], "outside of every tensor"),
        (["ld.global.b32 %r4, [%rd3 + 2]"], "not aligned to 4 bytes"),
        (["st.global.b32 [%rd2], %r1"], "race: two threads store"),
        (["st.global.b32 [%rd4], %r1", "st.global.b32 [%rd4], %r1"], "race: this launch stores"),
        (["st.global.b32 [%rd3], %r1", "ld.global.b32 %r4, [%rd3]"], "race: this launch stores"),
        (["st.shared.b32 [%r2 + 4], %r1"], "outside of the memory"),
        ([LOAD], "shared memory that was not written"),
        ([STORE, "st.shared.b32 [%r3], %r1"], "race: write to what another thread wrote"),
        *((body, "race: write to what another thread read") for body in WRITES_AFTER_READS),
        *((body, "race: read of what another thread wrote") for body in READS_AFTER_WRITES),
        (["mov.b32 %r4, 0", "st.shared.b32 [%r4], %r1"], "race: two threads write different values"),
        *(([*COPY, *body], "before cp.async.wait_group") for body in TOO_EARLY),
        *(([instruction], "threads diverge") for instruction in ("@%p1 bra $end", "@!%p1 bar.sync 0")),
    ],
)
def test_a_kernel_that_breaks_a_rule_faults_at_its_line(body, message):
    with pytest.raises(Fault, match=message):
        run_ptx(*body)


def test_kernels_with_all_barriers_and_waits_have_no_faults():
    for body in ([STORE, BARRIER, LOAD_OTHER, BARRIER, STORE], [*COPY, WAIT, BARRIER, LOAD_OTHER]):
        assert run_ptx(*body, "st.global.b32 [%rd4], %r4").tolist() == [i ^ 32 for i in range(64)]
    body = STORE, SYNC, *LOAD_NEXT, SYNC, STORE, "st.global.b32 [%rd4], %r4"
    assert run_ptx(*body).tolist() == [i ^ 1 for i in range(64)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (["sub.s32 %r4, %r1, 9", "div.s32 %r5, %r4, 4"], lambda i: int((i - 9) / 4)),
        (["neg.s32 %r4, %r1", "shr.s32 %r5, %r4, 40"], lambda i: -1 if i else 0),
        (["shl.b32 %r5, %r1, 32"], lambda i: 0),
        (["setp.neu.f32 %p2, 0f7FC00000, 0f7FC00000", "selp.b32 %r5, 1, 0, %p2"], lambda i: 1),
        (["max.f32 %r5, 0f7FC00000, 0f3F800000"], lambda i: 0x3F800000),
    ],
)
def test_an_instruction_gives_the_manual_s_result_where_numpy_s_is_another(body, expected):
    assert run_ptx(*body, "st.global.b32 [%rd4], %r5").tolist() == [expected(i) for i in range(64)]


# Instructions that may be missing, by the line of the kernel that they were compiled from.
REDUNDANT = {
    # After the loop nothing reads the shared memory that the last copies, all of zeros, write.
    ("a group too few", "for first in range(begin, end, KEYS):"),
    # The loop ends with a barrier, and the merge of splits after it is done in registers.
    ("no barrier", "tl.store(at_value, whole_acc.to(out.dtype.element_ty), mask=is_value)"),
    # The queries lie apart from what the first copies write. The loop has a barrier and a fence of its own
    # between copies and products, and these also follow the stores of the queries.
    ("no barrier", "k_cache + row * K_DIM + (slots[None, :] * (K * K_DIM) + k_dims[:, None]),"),
    ("no fence", "scores = _dot(queries, keys, UPCAST) * scale"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generation", "dtype", "head_dim"),
    [("sm75", HALF, 64), ("sm80", BRAIN, 64), ("sm80", FULL, 16), ("sm90", BRAIN, 128)],
)
def test_removing_any_barrier_fence_or_wait_is_noticed(generation, dtype, head_dim):
    lines = Path(backend.__file__).read_text().splitlines()
    launches, survivors = {}, []
    for max_programs in (6, 12):  # splits to a program: all of a sequence, or some
        batch = [(1, 300), (20, 250), (1, 40)]
        for emulated in execute(generation, batch, dtype, head_dim=head_dim, max_programs=max_programs):
            for launch in emulated.launches:
                ptx = compile_launch(emulated.kernel, *launch[:2], generation).asm["ptx"]
                launches.setdefault(ptx, []).append((emulated.kernel, launch))
    for original, affected in launches.items():
        for kind, (pattern, replacement) in MUTATIONS.items():
            for match in re.finditer(pattern, original):
                mutant = original[: match.start()] + replacement(match) + original[match.end() :]
                try:
                    for kernel, launch in affected:
                        for cta in Emulated(kernel, generation, lambda *_, ptx=mutant: ptx).ctas(*launch)[0]:
                            cta.run()
                except Fault:
                    continue
                place = re.findall(r"(?m)triton_attention\.py:(\d+):\d+(?: \])*$", mutant[: match.start()])
                survivors.append((kind, lines[int(place[-1]) - 1].strip()))
    assert set(survivors) <= REDUNDANT, survivors
