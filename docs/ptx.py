"""An interpreter of PTX, the machine-level code of NVIDIA's GPUs, for the kernels that Triton compiles.

A `Cta` (cooperative thread array) executes one program of a grid: up to 1,024 threads in warps of 32. All
execute an instruction together, so a register is an array with one element per thread.

A GPU runs the warps of a CTA in any order, and copies and multiplies while they continue. Executing them in
one order hides what goes wrong in another. So the interpreter checks the rules that make all orders equal.
It raises `Fault` where a kernel breaks one:

- Every access is aligned, and inside a tensor or the shared memory that the kernel asked for.
- Shared memory is written before it is read. Between two barriers, no thread touches a byte that another
  thread writes. Between threads of a warp, bar.warp.sync is a barrier. Until cp.async.wait_group no thread
  touches what cp.async writes. Until wgmma.wait_group no thread writes what wgmma reads. A fence.proxy.async
  stands between writing and wgmma.
- No register of a wgmma is accessed between wgmma.fence and wgmma, or from there to wgmma.wait_group.
- A launch stores each byte of global memory once and does not load it, because programs run in any order.
- All threads of a CTA take the same branch. PTX allows more, but Triton's kernels do not need it.

Each opcode names its section of https://docs.nvidia.com/cuda/parallel-thread-execution/#<section>. Any other
opcode is an error when the kernel is read, mbarrier and TMA copies too: Triton does not use them in these
kernels. Time, caches and how tensor cores and .approx instructions round are not modelled.
"""

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from docs.ptx_arithmetic import MOVE, TABLE, Lanes, from_half, pack

Operand = str | tuple[str, ...]
WARP = 32


class Fault(Exception):
    """A kernel broke a rule of the machine, or needs what the interpreter does not have."""


@cache
def dtype_of(kind: str) -> np.dtype[Any]:
    """Return NumPy's dtype for one of PTX, such as s32. Registers (b32) are unsigned."""
    return np.dtype(
        bool if kind == "pred" else {"s": "i", "f": "f"}.get(kind[0], "u") + str(int(kind[1:]) // 8)
    )


@cache
def constant(operand: str) -> int:
    """Return the bits of a constant, such as 16, 0x10 or 0f41800000."""
    return int(re.sub("^0[fd]", "0x", operand).rstrip("U"), 0)


def rows(addresses: Lanes, size: int, end: int) -> Lanes:
    """Return the indices of aligned rows of `size` bytes within `end` bytes."""
    if (addresses % size).any():
        raise Fault(f"an address is not aligned to {size} bytes")
    if (addresses < 0).any() or (addresses + size > end).any():
        raise Fault("an address is outside of the memory")
    return addresses // size


# ---- Memory --------------------------------------------------------------------------------------

WRITTEN, COPYING, MULTIPLYING, UNPUBLISHED = 1, 2, 4, 8  # flags of a byte of shared memory
# The users of a byte since the last barrier: none, threads of several warps, one thread (its number), or
# threads of warp w: OF_WARP + w, and SYNCED + w if bar.warp.sync came afterwards.
NOBODY, SEVERAL, OF_WARP, SYNCED = -1, -2, 2000, 3000
# The warp of each user. NOBODY and SEVERAL, which are negative, index the last two.
WARPS: Lanes = np.r_[np.arange(OF_WARP) // WARP, np.arange(OF_WARP) % 1000, -1, -1].astype(np.int16)


def warp_of(users: Lanes) -> Lanes:
    """Return the warps of users, or -1."""
    return WARPS[users]


def clash(before: Lanes, users: Lanes) -> bool:
    """Return whether another thread used the bytes before, without a barrier since."""
    if (before == NOBODY).all():
        return False
    is_same = (before == users[:, None]) & (users[:, None] < OF_WARP) & (users[:, None] >= 0)
    return not (is_same | (before == NOBODY) | (before == SYNCED + warp_of(users)[:, None])).all()


def together(at: Lanes, users: Lanes) -> Lanes:
    """Return a user for each of (N,) ascending users, which stands for all that are at the same place."""
    lowest, highest = (np.empty(at.max() + 1, np.int16) for _ in range(2))
    highest[at], lowest[at[::-1]] = users, users[::-1]
    low, high = lowest[at], highest[at]
    warp = warp_of(low)
    of_many = np.where(warp == warp_of(high), OF_WARP + warp, SEVERAL)
    return np.where(low == high, users, of_many)


class SharedMemory:
    """The memory that the threads of a CTA share, and which threads used each byte since the last barrier."""

    def __init__(self, size: int) -> None:
        size = -(-size // 16) * 16
        self.bytes, self.flags = np.full(size, 0xCD, np.uint8), np.zeros(size, np.uint8)
        self.writer, self.reader = (np.full(size, NOBODY, np.int16) for _ in range(2))

    def read(self, addresses: Lanes, size: int, threads: Lanes, flag: int = 0) -> Lanes:
        """Return the bytes that each of (N,) threads reads at its address, (N, size). Set `flag` for them."""
        at = rows(addresses, size, len(self.bytes))
        held, flags, writer, reader = self.views(size)
        marks, before = flags[at], reader[at]
        if not (marks & WRITTEN).all():
            raise Fault("read of shared memory that was not written")
        if (marks & COPYING).any():
            raise Fault("read of shared memory before cp.async.wait_group")
        if flag == MULTIPLYING and (marks & UNPUBLISHED).any():
            raise Fault("wgmma reads shared memory before fence.proxy.async")
        if clash(writer[at], threads):
            raise Fault("race: read of what another thread wrote since the last barrier")
        user = together(at, threads)[:, None]
        is_alone = (before == NOBODY) | (before == user)
        if not is_alone.all():
            warp = warp_of(user)
            of_many = np.where(warp_of(before) == warp, OF_WARP + warp, SEVERAL)
            user = np.where(is_alone, user, of_many)
        reader[at] = user
        if flag:
            flags[at] |= flag
        return held[at]

    def write(self, addresses: Lanes, values: Lanes, threads: Lanes, flag: int = 0) -> None:
        """Write (N, size) bytes, one row for each of (N,) threads. With COPYING, they arrive later."""
        at = rows(addresses, values.shape[1], len(self.bytes))
        held, flags, writer, reader = self.views(values.shape[1])
        if (flags[at] & (COPYING | MULTIPLYING)).any():
            raise Fault("write to shared memory before cp.async.wait_group or wgmma.wait_group")
        for users, verb in (writer, "wrote"), (reader, "read"):
            if clash(users[at], threads):
                raise Fault(f"race: write to what another thread {verb} since the last barrier")
        held[at], writer[at], flags[at] = values, threads[:, None], WRITTEN | UNPUBLISHED | flag
        if (held[at] != values).any():
            raise Fault("race: two threads write different values")

    def views(self, size: int) -> list[Lanes]:
        """Return bytes, flags, writers and readers as rows of `size` bytes."""
        return [x.reshape(-1, size) for x in (self.bytes, self.flags, self.writer, self.reader)]


GUARD, ORIGIN = 1 << 20, 1 << 40  # bytes between tensors; the address of the first


class GlobalMemory:
    """The tensors of a launch, far apart, and which of their bytes the launch loaded and stored."""

    def __init__(self, tensors: Iterable[tuple[torch.Tensor, bool]]) -> None:
        """Place tensors, at multiples of 16 bytes only if Triton was told so."""
        self.places: list[tuple[int, Lanes]] = []
        sized, end = [], GUARD
        for x, is_aligned in tensors:
            num = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            data = x.as_strided((num if x.numel() else 0,), (1,)).view(torch.uint8).numpy()
            self.places.append((end if is_aligned else end + x.element_size(), data))
            sized.append(x)
            end += (len(data) // GUARD + 2) * GUARD
        self.bytes = np.zeros(end, np.uint8)
        self.allowed, self.loaded, self.stored = (np.zeros(end, np.bool_) for _ in range(3))
        for x, (start, data) in zip(sized, self.places, strict=True):
            self.bytes[start : start + len(data)] = data
            strides = (*(step * x.element_size() for step in x.stride()), 1)
            shape = (*x.shape, x.element_size())
            np.lib.stride_tricks.as_strided(self.allowed[start:], shape, strides)[...] = True

    @property
    def addresses(self) -> list[np.uint64]:
        """The addresses of the tensors, in their order."""
        return [np.uint64(ORIGIN + start) for start, _ in self.places]

    def access(self, addresses: Lanes, size: int, values: Lanes | None = None) -> Lanes:
        """Return the (N, size) bytes at (N,) addresses. If there are values, store them before."""
        at = rows(addresses.astype(np.int64) - ORIGIN, size, len(self.bytes))
        held, allowed, loaded, stored = (
            x.reshape(-1, size) for x in (self.bytes, self.allowed, self.loaded, self.stored)
        )
        if not allowed[at].all():
            raise Fault("an address is outside of every tensor")
        if stored[at].any() or (values is not None and loaded[at].any()):
            raise Fault("race: this launch stores the same global memory elsewhere")
        if values is None:
            loaded[at] = True
        else:
            held[at], stored[at] = values, True
            if len(np.unique(at)) < len(at):
                raise Fault("race: two threads store to the same global memory")
        return held[at]

    def copy_back(self) -> None:
        """Give the tensors what was stored."""
        for start, data in self.places:
            here = slice(start, start + len(data))
            data[self.stored[here]] = self.bytes[here][self.stored[here]]


# ---- Instructions --------------------------------------------------------------------------------


class Instruction(NamedTuple):
    """One instruction: `@!predicate opcode operands`."""

    line: int
    text: str
    predicate: str | None
    negated: bool
    execute: Callable[..., None]
    modifiers: tuple[str, ...]  # the groups of the opcode's pattern
    collective: bool  # no thread is left out
    operands: list[Operand]


OPCODES: dict[str, tuple[Callable[..., None], str]] = {}  # by pattern: what executes it, and its section


def opcode(pattern: str, section: str) -> Callable[[Any], Any]:
    """Register what executes the opcodes that match a pattern."""

    def register(execute: Any) -> Any:
        OPCODES[pattern] = execute, section
        return execute

    return register


@cache
def meaning(name: str) -> tuple[Callable[..., None], Any] | None:
    """Return what executes an opcode, and the groups of its pattern."""
    tried = ((execute, re.fullmatch(pattern, name)) for pattern, (execute, _) in OPCODES.items())
    return next(((execute, found.groups()) for execute, found in tried if found), None)


class Kernel:
    """A kernel's PTX as a list of instructions, and the bytes of shared memory that it needs."""

    def __init__(self, ptx: str, shared: int) -> None:
        head = re.search(r"\.entry (\w+)\((.*?)\)\s*\.reqntid (\d+)[^{]*\{", ptx, re.DOTALL)
        assert head
        self.name, self.num_threads, self.shared = head[1], int(head[3]), shared
        self.params = re.findall(r"\w+_param_\d+", head[2])
        registers = re.findall(r"\.reg \.(\w+)\s+(%\w+)<", ptx)
        self.widths = {prefix: dtype_of(kind).itemsize for kind, prefix in registers}
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        first = ptx[: head.end()].count("\n") + 1
        for line, text in enumerate(ptx[head.end() :].partition("-- End function")[0].split("\n"), first):
            text = " ".join(text.partition("//")[0].rstrip("; \t").split())
            if text.endswith(":"):
                self.labels[text[:-1]] = len(self.code)
            elif text and text[0] not in "{}.":
                self.code.append(self.read(line, text))

    @staticmethod
    def read(line: int, text: str) -> Instruction:
        """Return the instruction of a line."""
        match = re.fullmatch(r"(?:@(!?)(%\w+) )?(\S+) ?(.*)", text)
        assert match
        negation, predicate, name, rest = match.groups()
        operands: list[Operand] = [
            tuple(x[1:-1].replace(" ", "").split(",")) if x[0] == "{" else x.replace(" ", "")
            for x in re.findall(r"\{.*?\}|\[.*?\]|[^,\s]+", rest)
        ]
        collective = bool(re.match(r"bra|ret|fence|.*(\.sync|_group)", name))
        if not (found := meaning(name)):
            raise Fault(f"unknown opcode {name} in line {line}: {text}")
        return Instruction(line, text, predicate, negation == "!", *found, collective, operands)


SYNC = "parallel-synchronization-and-communication-instructions-"
MATRIX, WGMMA = "warp-level-matrix-instructions-", "asynchronous-warpgroup-level-matrix-instructions-"


class Cta:
    """One program of a grid: the registers of its threads, its shared memory, and the next instruction."""

    def __init__(
        self, kernel: Kernel, memory: GlobalMemory, arguments: list[Any], index: Any, grid: Any
    ) -> None:
        self.kernel, self.memory, self.arguments = kernel, memory, arguments
        self.shared = SharedMemory(kernel.shared)
        self.next: int | None = 0
        self.active: Any = ...  # the threads that execute the instruction: all, or a mask
        # groups of cp.async: addresses, size, threads
        self.copies: list[list[tuple[Lanes, int, Lanes]]] = [[]]
        self.products: list[list[Lanes]] = [[]]  # groups of wgmma: addresses that they read
        self.busy: set[str] = set()  # registers of wgmma in flight
        self.accessed: set[str] | None = None  # registers, since wgmma.fence; None before the first
        threads = np.arange(kernel.num_threads, dtype=np.uint32)
        self.threads, self.lane = threads.astype(np.int16), threads.astype(np.int64) % WARP
        self.registers = {"%tid.x": threads, "global_smem": np.zeros_like(threads)}
        for axis, *numbers in zip("xyz", index, grid, strict=True):
            for name, number in zip(("%ctaid.", "%nctaid."), numbers, strict=True):
                self.registers[name + axis] = np.full_like(threads, number)

    def run(self) -> None:
        """Execute instructions until the kernel returns."""
        with np.errstate(all="ignore"):
            while self.next is not None:
                self.step()

    def step(self) -> None:
        """Execute one instruction, unless its predicate is false in all threads."""
        assert self.next is not None
        it = self.kernel.code[self.next]
        self.next += 1
        self.active = ...
        try:
            if it.predicate is not None:
                active = self.get(it.predicate, "pred") ^ it.negated
                self.active = ... if active.all() else active
                if not active.any():
                    return
            if it.collective and self.active is not ...:
                raise Fault("threads diverge")
            it.execute(self, it.operands, *it.modifiers)
        except Fault as fault:
            raise Fault(f"{fault}, in line {it.line} of {self.kernel.name}: {it.text}") from None

    def get(self, operand: Operand, kind: str) -> Lanes:
        """Return a register, or a constant for each thread, as elements of a type."""
        assert isinstance(operand, str)
        dtype = dtype_of(kind)
        if operand in self.registers:
            value = self.registers[operand]
            self._access(operand, value.itemsize == dtype.itemsize)
            return value.view(dtype)
        if operand.startswith("%"):
            raise Fault(f"{operand} is read before it is written")
        bits = constant(operand) % (1 << 8 * dtype.itemsize)
        return np.full(self.kernel.num_threads, bits, f"u{dtype.itemsize}").view(dtype)

    def put(self, register: Operand, value: Lanes, *, extend: bool = False) -> None:
        """Write a register of the active threads. With `extend`, it may be wider than the value."""
        assert isinstance(register, str)
        if register == "_":  # a sink
            return
        width = self.kernel.widths[register.rstrip("0123456789")]
        if extend and value.itemsize < width:
            value = value.astype(f"{value.dtype.kind}{width}")
        self._access(register, value.itemsize == width)
        if self.active is not ...:
            old = self.registers.get(register, np.zeros_like(value)).view(value.dtype)
            value = np.where(self.active, value, old)
        self.registers[register] = value

    def _access(self, register: str, fits: bool) -> None:
        if not fits:
            raise Fault(f"{register} has another size")
        if register in self.busy:
            raise Fault(f"{register} is accessed before wgmma.wait_group")
        if self.accessed is not None:
            self.accessed.add(register)

    def addresses(self, operand: Operand) -> Lanes:
        """Return the address "[register+offset]" of each active thread."""
        base, _, offset = str(operand)[1:-1].partition("+")
        register: Lanes = self.get(base, "s64" if base.startswith("%rd") else "u32")[self.active]
        return register.astype(np.int64) + int(offset or "0", 0)

    # ---- Moving and converting

    @opcode(r"mov\.(pred|[bsuf](?:16|32|64))", MOVE + "mov")
    def _move(self, operands: list[Operand], kind: str) -> None:
        """Copy a register, also to or from two registers of half as many bits, low half first."""
        to, source = operands
        half = "b16" if kind == "b32" else "b32"
        if isinstance(to, tuple):
            for i, register in enumerate(to):
                self.put(register, self.get(source, kind).view(dtype_of(half))[i::2].copy())
        elif isinstance(source, tuple):
            self.put(to, pack(*(self.get(x, half) for x in source)))
        else:
            self.put(to, self.get(source, kind))

    @opcode(r"ld\.(param|global|shared)(?:\.v[24])?\.([bsuf](?:8|16|32|64))", MOVE + "ld")
    def _load(self, operands: list[Operand], space: str, kind: str) -> None:
        """Load an argument, or a register or several from consecutive bytes of memory."""
        registers = operands[0] if isinstance(operands[0], tuple) else (operands[0],)
        num, dtype = self.kernel.num_threads, dtype_of(kind)
        if space == "param":
            argument = self.arguments[self.kernel.params.index(str(operands[1])[1:-1])]
            return self.put(operands[0], np.full(num, argument).view(dtype), extend=True)
        addresses, size = self.addresses(operands[1]), dtype.itemsize * len(registers)
        if space == "global":
            loaded = self.memory.access(addresses, size)
        else:
            loaded = self.shared.read(addresses, size, self.threads[self.active])
        values = np.zeros((num, len(registers)), dtype)
        values[self.active] = loaded.view(dtype)
        for register, column in zip(registers, values.T, strict=True):
            self.put(register, column.copy(), extend=True)

    @opcode(r"st\.(global|shared)(?:\.v[24])?\.([bsuf](?:8|16|32|64))", MOVE + "st")
    def _store(self, operands: list[Operand], space: str, kind: str) -> None:
        registers = operands[1] if isinstance(operands[1], tuple) else (operands[1],)
        wide = kind.replace("8", "16")  # no register has 8 bits
        values = np.stack([self.get(x, wide)[self.active].astype(dtype_of(kind)) for x in registers], 1)
        values = values.view(np.uint8)
        if space == "global":
            self.memory.access(self.addresses(operands[0]), values.shape[1], values)
        else:
            self.shared.write(self.addresses(operands[0]), values, self.threads[self.active])

    @opcode(r"shfl\.sync\.(bfly|idx|up)\.b32", MOVE + "shfl-sync")
    def _shuffle(self, operands: list[Operand], mode: str) -> None:
        """Read a register of another thread of the warp.

        It is lane i ^ b (bfly), lane b (idx), or lane i - b (up): the first lanes then read their own.
        """
        to, source, by, *whole_warp = operands
        if whole_warp != ["0" if mode == "up" else "31", "-1"]:
            raise Fault("a shuffle among a part of a warp is not supported")
        b = self.get(by, "u32").astype(np.int64)
        lane = {"bfly": self.lane ^ b, "idx": b % WARP, "up": self.lane - b}[mode]
        lane = np.where(lane < 0, self.lane, lane)
        self.put(to, self.get(source, "b32")[np.arange(len(b)) - self.lane + lane])

    @opcode(r"redux\.sync\.(max|add)\.s32", SYNC + "redux-sync")
    def _reduce(self, operands: list[Operand], what: str) -> None:
        """Write a warp's largest number, or the sum, to all its threads. The mask comes from a register."""
        if (self.get(operands[2], "b32") != 0xFFFFFFFF).any():
            raise Fault("a reduction of a part of a warp is not supported")
        numbers = self.get(operands[1], "s32").reshape(-1, WARP)
        result = numbers.max(1) if what == "max" else numbers.sum(1, dtype=np.int32)
        self.put(operands[0], result.repeat(WARP))

    # ---- Control and synchronization

    @opcode(r"bra(?:\.uni)?", "control-flow-instructions-bra")
    @opcode(r"ret", "control-flow-instructions-ret")
    def _jump(self, operands: list[Operand]) -> None:
        self.next = self.kernel.labels[str(operands[0])] if operands else None

    @opcode(r"bar\.sync", SYNC + "bar")
    def _barrier(self, operands: list[Operand]) -> None:
        """Wait for all threads of the CTA: what they did before happens before what they do afterwards."""
        self.shared.writer.fill(NOBODY)
        self.shared.reader.fill(NOBODY)

    @opcode(r"bar\.warp\.sync", SYNC + "bar-warp-sync")
    def _warp_barrier(self, operands: list[Operand]) -> None:
        """Wait for the threads of the warp: what they did before happens before what they do afterwards."""
        for users in self.shared.writer, self.shared.reader:
            users[users >= 0] = (SYNCED + warp_of(users))[users >= 0]

    @opcode(r"fence\.proxy\.async\.shared::cta", SYNC + "membar")
    @opcode(r"wgmma\.fence\.sync\.aligned()", WGMMA + "wgmma-fence")
    def _fence(self, operands: list[Operand], *of_registers: str) -> None:
        """Order what came before, in shared memory or in registers, before the wgmma that follow."""
        if of_registers:
            self.accessed = set()
        else:
            self.shared.flags &= ~np.uint8(UNPUBLISHED)

    @opcode(r"cp\.async\.c[ag]\.shared\.global", MOVE + "cp-async")
    def _copy(self, operands: list[Operand]) -> None:
        """Start to copy `size` bytes to shared memory, or zeros where the last operand is 0."""
        size, to, source = int(str(operands[2]), 0), self.addresses(operands[0]), self.addresses(operands[1])
        count = self.get(operands[-1], "u32")[self.active]
        if not np.isin(count, (0, size)).all():
            raise Fault("a copy of a part is not supported")
        values, threads = np.zeros((len(to), size), np.uint8), self.threads[self.active]
        values[count > 0] = self.memory.access(source[count > 0], size)
        self.shared.write(to, values, threads, COPYING)
        self.copies[-1].append((to, size, threads))

    @opcode(r"(cp)\.async\.commit_group", MOVE + "cp-async-commit-group")
    @opcode(r"(wgmma)\.commit_group\.sync\.aligned", WGMMA + "wgmma-commit-group")
    def _commit(self, operands: list[Operand], what: str) -> None:
        (self.products if what == "wgmma" else self.copies).append([])

    @opcode(r"cp\.async\.wait_group", MOVE + "cp-async-wait-group")
    def _wait_for_copies(self, operands: list[Operand]) -> None:
        """Wait until at most N groups are in flight. A thread waits for its own copies only."""
        while len(self.copies) - 1 > int(str(operands[0])):
            for to, size, threads in self.copies.pop(0):
                _, flags, writer, _ = self.shared.views(size)
                flags[to // size] &= ~np.uint8(COPYING)
                writer[to // size] = threads[:, None]

    @opcode(r"wgmma\.wait_group\.sync\.aligned", WGMMA + "wgmma-wait-group")
    def _wait_for_products(self, operands: list[Operand]) -> None:
        """Wait until at most N groups are in flight. The registers of all are busy until none is."""
        _, flags, _, reader = self.shared.views(2)
        while len(self.products) - 1 > int(str(operands[0])):
            for at in self.products.pop(0):
                flags[at // 2] &= ~np.uint8(MULTIPLYING)
                reader[at // 2] = SEVERAL
        self.busy = self.busy if len(self.products) > 1 else set()

    # ---- Tensor cores

    @opcode(r"(ld)matrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16", MATRIX + "ldmatrix")
    @opcode(r"(st)matrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16", MATRIX + "stmatrix")
    def _matrix(self, operands: list[Operand], op: str, trans: str | None) -> None:
        """Load or store an (8, 8) matrix per register. Lanes 8i to 8i + 7 have the addresses of its rows."""
        registers, address = operands if op == "ld" else operands[::-1]
        num = len(registers)
        addresses = self.addresses(address).reshape(-1, WARP)[:, : 8 * num].flatten()
        warps = np.repeat(OF_WARP + warp_of(self.threads[::WARP]), 8 * num)
        if op == "st":
            bits = np.stack([self.get(x, "b32").reshape(-1, 8, 4) for x in registers], 1)
            matrices = bits.view(np.uint16).swapaxes(2, 3) if trans else bits
            values = np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, 16)
            return self.shared.write(addresses, values, warps)
        read = self.shared.read(addresses, 16, warps)
        matrices = read.view(np.uint16).reshape(-1, num, 8, 8)
        for i, register in enumerate(registers):
            matrix = matrices[:, i].swapaxes(1, 2) if trans else matrices[:, i]
            self.put(register, np.ascontiguousarray(matrix).view(np.uint32).reshape(-1))

    def _fragments(self, registers: Operand, kind: str, below: int) -> Lanes:
        """Return the matrix that each warp holds in packed registers."""
        bits = np.stack([self.get(x, "b32") for x in registers]).reshape(len(registers), -1, WARP, 1)
        matrix = np.empty((bits.shape[1], 8 * below, 8 * len(registers) // below), np.float32)
        matrix[:, *places(len(registers), below)] = from_half(bits.view(np.uint16), kind).swapaxes(0, 1)
        return matrix

    @opcode(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(b?f16)\.b?f16\.f32", MATRIX + "mma")
    def _multiply(self, operands: list[Operand], kind: str) -> None:
        """Multiply (16, 16) by (16, 8) and add (16, 8) float32, in each warp."""
        d, a, b, c = operands
        product = self._fragments(a, kind, 2) @ self._fragments(b, kind, 1).swapaxes(1, 2)
        added = [self.get(x, "f32") for x in c]
        for register, row, old in zip(d, to_registers(product), added, strict=True):
            self.put(register, row + old)

    def _described(self, descriptor: Operand, num: int, trans: bool, kind: str) -> Lanes:
        """Return the (num, 16) matrix in shared memory that a matrix descriptor describes.

        Rows of 128, 64 or 32 bytes hold elements of one row of the matrix; transposed, of one column. Eight
        such rows are an atom, in which pieces of 16 bytes are swizzled: piece p of row r is at p ^ r, so that
        a column's pieces are in different banks. `leading` and `stride` lead from an atom to the next one.
        """
        words = self.get(descriptor, "u64")
        start, leading, stride = ((int(words[0]) >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        swizzle = int(words[0]) >> 62
        if (words != words[0]).any() or not swizzle:
            raise Fault("descriptors that differ or do not swizzle are not supported")
        width, (i, k) = 256 >> swizzle, np.ogrid[:num, :16]
        if trans:
            at = start + i * 2 // width * leading + i * 2 % width + k // 8 * stride + k % 8 * width
        else:
            at = start + i // 8 * stride + i % 8 * width + k * 2
        at = (at ^ (at >> 7 & width // 16 - 1) << 4).reshape(-1)
        read = self.shared.read(at, 2, np.full(len(at), SEVERAL, np.int16), MULTIPLYING)
        self.products[-1].append(at)
        return from_half(read.view(np.uint16).reshape(num, 16), kind)

    @opcode(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.b?f16", WGMMA + "wgmma-mma-async")
    def _multiply_in_warpgroup(self, operands: list[Operand], n: str, kind: str) -> None:
        """Start to multiply (64, 16), in registers or shared memory, by (16, n) in shared memory, and add."""
        d, a, b, is_added, *flags = operands
        if self.kernel.num_threads != 4 * WARP or flags[:2] != ["1", "1"]:
            raise Fault("several warpgroups or a negated factor are not supported")
        used = {*d, *(a if isinstance(a, tuple) else ())}
        if self.accessed is None or self.accessed & used:
            raise Fault("a register is accessed after wgmma.fence")
        busy, self.busy, accessed = self.busy | used, set(), set(self.accessed)
        if isinstance(a, tuple):
            left = self._fragments(a, kind, 2)
        else:
            left = self._described(a, 64, flags[-2] == "1", kind).reshape(4, 16, 16)
        product = to_registers(left @ self._described(b, int(n), flags[-1] == "1", kind).T)
        add = self.get(is_added, "pred")[0]
        for register, row in zip(d, product, strict=True):
            self.put(register, row + self.get(register, "f32") if add else row)
        self.busy, self.accessed = busy, accessed


def places(num: int, below: int) -> tuple[Lanes, Lanes]:
    """Return the rows and columns of the two elements of `num` registers in each lane: (num, 32, 2) each.

    A register of all lanes holds an (8, 8) matrix, and each lane two neighbours of a row. `below` registers
    lie below each other, the next ones to their right.
    """
    register, lane, pair = np.ogrid[:num, :WARP, :2]
    return register % below * 8 + lane // 4 + 0 * pair, register // below * 8 + lane % 4 * 2 + pair


def to_registers(product: Lanes) -> Lanes:
    """Return the registers of float32 in which the warps hold (warps, 16, n): (n / 2, threads)."""
    num = product.shape[2] // 4
    parts = product[:, *places(num, 2)].transpose(1, 3, 0, 2)  # register, element, warp, lane
    return np.ascontiguousarray(parts).reshape(2 * num, -1)


# ---- Arithmetic ----------------------------------------------------------------------------------


def by_thread(kinds: str, compute: Any) -> Callable[..., None]:
    """Return what executes an opcode of the table: it treats each thread by itself."""

    @cache
    def types_of(groups: tuple[str | None, ...]) -> tuple[list[str], Any]:
        kind = next((x for x in groups if x), "")
        wide = f"{kind[0]}{2 * int(kind[1:])}" if kinds[0] == "w" else kind
        types = {"t": kind, "w": kind, "W": wide, "u": "u32", "p": "pred", "h": "b16"}
        return [types[letter] for letter in kinds], wide != kind and dtype_of(wide)

    def execute(cta: Cta, operands: list[Operand], *groups: str | None) -> None:
        types, wide = types_of(groups)
        inputs = [cta.get(x, kind) for x, kind in zip(operands[1:], types, strict=True)]
        cta.put(operands[0], compute(*(x.astype(wide) for x in inputs) if wide else inputs))

    return execute


OPCODES |= {
    pattern.replace(".", r"\."): (by_thread(kinds, compute), section)
    for pattern, kinds, section, compute in TABLE
}
