"""Adds compiled kernels to a wheel, for machines without a compiler. pyproject.toml has everything else."""

import platform
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.install_lib import install_lib

sys.path.insert(0, str(Path(__file__).parent))
from nanoengine.backends.cpu import build


class InstallWithKernels(install_lib):
    """Adds libraries to the files of a wheel. An editable installation, and the source tree, get none."""

    def run(self) -> None:
        """See the base class."""
        super().run()
        if platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64":
            return
        folder = Path(self.install_dir) / build.FOLDER.relative_to(Path(__file__).parent)
        try:
            kinds = [(folder, *kind) for kind in product(build.LEVELS, (7, 15), (False, True))]
            with ThreadPoolExecutor() as pool:
                list(pool.map(compile_library, *zip(*kinds, strict=True)))
        except (build.NoKernelsError, OSError, subprocess.CalledProcessError) as error:
            print(f"warning: the wheel has no compiled kernels: {error}", file=sys.stderr)


def compile_library(folder: Path, level: str, types: int, exact: bool) -> None:
    """Compile the kernels for a level of x86-64. The file's name ends with the digest of its content."""
    flags = build.FLAGS.replace("-march=native", build.LEVELS[level][1])
    command = build.compiler_command(f"{flags} -s -DTYPES={types}{' -DEXACT' * exact}")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernels.so"
        subprocess.run([*command, str(build.SOURCE), "-o", str(path)], check=True)
        content = path.read_bytes()
    name = f"{level}-{types & 8}-{exact:d}-{build.digest(content)}.so"
    (folder / name).write_bytes(content)


class TaggedWheel(bdist_wheel):
    """Tags a wheel with the platform of its libraries: Linux on x86-64, and the C library that they need."""

    def get_tag(self) -> tuple[str, str, str]:
        """See the base class."""
        libraries = [path.read_bytes() for path in Path(self.bdist_dir).rglob("*.so")]
        if not libraries:
            return super().get_tag()
        self.root_is_pure = False
        glibc = max(int(minor) for library in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", library))
        return "py3", "none", f"manylinux_2_{glibc}_x86_64"


setup(cmdclass={"install_lib": InstallWithKernels, "bdist_wheel": TaggedWheel})
