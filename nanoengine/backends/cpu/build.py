"""The library of C++ kernels: compiled for this machine's processor at first use, and cached between runs.

A wheel contains libraries for machines without a compiler, compiled for levels of x86-64 (setup.py).
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from nanoengine.signals import uninterrupted
from nanoengine.timing import phase

FOLDER = Path(__file__).parent  # also of the libraries in a wheel
SOURCE, HEADERS = FOLDER / "kernels.cpp", sorted(FOLDER.glob("*.h"))
# The parts of -ffast-math that preserve NaN, infinity, and the order of sums, which decides the last bit.
FLAGS = (
    "-O3 -march=native -std=c++17 -fopenmp -shared -fPIC -fno-math-errno -fno-trapping-math -fno-signed-zeros"
)
V3 = "avx2 fma f16c bmi1 bmi2 abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16 avx512_vnni"
# The processors that a wheel has libraries for, the fastest first: features in /proc/cpuinfo, and options.
LEVELS = {
    "x86-64-v4": (V4, "-march=x86-64-v4 -mavx512bf16 -mavx512vnni"),
    "x86-64-v3": (V3, "-march=x86-64-v3"),
}


class NoKernelsError(RuntimeError):
    """Raised if there are no kernels for this machine. The message gives the reason."""


def load_library(types: int, exact: bool = False) -> tuple[ctypes.CDLL, bool]:
    """Load the kernels for some of `kernels.TYPES` (8: with an int8 KV cache), which are compiled if needed.

    If they cannot be compiled, a library of the wheel is loaded. A file's name contains the digest of its
    content, so that a truncated file is not loaded. If the compiler does not support OpenMP, as Apple's does
    not, the kernels use one thread. Returns the library, and whether it was compiled now. NoKernelsError:
    there is no compiler, or the compiler fails, and the wheel has no library.
    """
    flags = f"{FLAGS} -DEXACT" if exact else FLAGS
    try:
        return _load(types, flags)
    except NoKernelsError as error:
        if "-fopenmp" in str(error).partition(" failed: ")[2]:
            return _load(types, flags.replace("-fopenmp", "-fopenmp-simd"))
        features = {*_processor().split()}
        levels = (level for level, (needed, _) in LEVELS.items() if features >= {*needed.split()})
        library = _find(FOLDER, f"{next(levels, None)}-{types & 8}-{exact:d}")  # named by setup.py
        if library is None:
            raise
        return library, False


def _load(types: int, flags: str) -> tuple[ctypes.CDLL, bool]:
    command = compiler_command(f"{flags} -DTYPES={types}")
    try:
        program = shutil.which(command[0]) or command[0]
        version = _version(program, os.stat(program).st_mtime_ns)
        sources = [path.read_text() for path in (SOURCE, *HEADERS)]
        build = "\n".join((*sources, *command, version, _processor()))
        name = f"kernels-{digest(build.encode())}"
        cache = _cache()
        if cache is not None and (library := _find(cache, name)) is not None:
            return library, False
        writable = cache if cache is not None and os.access(cache, os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=writable) as directory:
            path = Path(directory) / "kernels.so"
            with phase("compiling", "compiling the kernels for this processor, once"):
                _run([*command, str(SOURCE), "-o", str(path)], directory)
            if writable is not None:  # atomically: another process may do the same
                path = path.replace(writable / f"{name}-{digest(path.read_bytes())}.so")
            return ctypes.CDLL(str(path)), True
    except TimeoutError:  # raised by the handler of a signal
        raise
    except OSError as error:
        raise NoKernelsError(str(error)) from error


@cache  # an engine in a large process would wait 10 ms for each fork
def _version(program: str, changed: int) -> str:
    """Return what a compiler says of itself. `changed` is when its file last changed."""
    return _run([program, "--version"], tempfile.gettempdir())


def compiler_command(flags: str) -> list[str]:
    """Return the compiler with these flags. Raises NoKernelsError if there is no compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoKernelsError("no C++ compiler; install g++ or clang++, or set CXX")
    program, *options = compiler.split()
    return [program, *flags.split(), *options]  # $CXX may say -march=x86-64-v3


def _find(folder: Path, name: str) -> ctypes.CDLL | None:
    """Load the library of that name if its content has the digest that is the last part of its file name."""
    for path in folder.glob(f"{name}-*.so"):
        with suppress(OSError):
            if path.name == f"{name}-{digest(path.read_bytes())}.so":
                return ctypes.CDLL(str(path))
    return None


COMPILER_SECONDS = 600  # then it is killed; a small board, or a loaded machine, needs more than a minute


def _run(command: list[str], directory: str) -> str:
    """Run a compiler, none of whose processes outlives the call, and return its output, or NoKernelsError."""
    with ExitStack() as delayed:
        # A signal between Popen and `try` would leave the compiler running.
        delayed.enter_context(uninterrupted())
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": directory},
            start_new_session=True,  # its own process group: the compiler starts other processes
        )
        try:
            delayed.close()
            out, err = process.communicate(timeout=COMPILER_SECONDS)
        except subprocess.TimeoutExpired:
            raise NoKernelsError(f"{' '.join(command)} did not end in {COMPILER_SECONDS} s") from None
        finally:
            with uninterrupted(), suppress(OSError):  # normally the group has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise NoKernelsError(f"{' '.join(command)} failed: {err[-500:]}")
    return out


def digest(data: bytes) -> str:
    """Return the digest that a library's file name ends with."""
    return hashlib.sha256(data).hexdigest()[:32]


def _cache() -> Path | None:
    """Return the user's cache directory for kernels, or None if it cannot be created."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "nanoengine"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cache
    except (OSError, RuntimeError):  # a read-only disk; a user without a home
        return None


def _processor() -> str:
    """Return the processor's features, which `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    flags = re.search(r"(?m)^(flags|Features).*$", info.read_text()) if info.exists() else None
    return f"{platform.machine()} {flags[0] if flags else platform.processor()}"
