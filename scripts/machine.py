"""Anneal's requirements of a machine, and checks of this one.

Standard library only; runs under any Python from 3.8 on.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

GB = 10**9
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
PYTHONS_TEXT = "3.11 to 3.14"
ARCHITECTURES = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "arm64", "arm64": "arm64"}
OLDEST_GLIBC = (2, 31)  # llguidance's wheels are built for it; those of torch and Valkey run on 2.28
CPU_FEATURES = {"x86-64": ("avx2", "fma", "f16c"), "arm64": ("asimd",)}  # the minimum for vLLM's CPU build
# System libraries that the wheels need, and their Debian packages; a minimal Debian lacks the first.
LIBRARIES = {"libnuma.so.1": "libnuma1", "libstdc++.so.6": "libstdc++6", "libz.so.1": "zlib1g"}
# All processes use about 4.2 GB at most: while a job trains and the engine loads.
MEMORY_BYTES = 5 * GB
# The environments take 2.8 GB (2.1 GB of it for torch, vLLM and their dependencies), the tests' programs 0.5 GB, data
# 0.5 GB. Packages are linked to the cache; if that is on another disk, it needs room for them too.
DISK_BYTES = 5 * GB
CACHE_BYTES = 3 * GB
# With CUDA, torch, vLLM and their dependencies take 8.7 GB in place of 2.1 GB, and 4.1 GB of the download.
GPU_BYTES = 7 * GB
DOWNLOAD_BYTES, GPU_DOWNLOAD_BYTES = 1.2 * GB, 5 * GB
CONTAINER = "docker compose -f deploy/demo.compose.yaml up --build"


@dataclass(frozen=True)
class Check:
    """One requirement; `fix` describes what to do if it is missing, and is empty if it is met."""

    name: str
    needed: str
    found: str
    fix: str = ""


def foreign_system() -> str:
    """Return a sentence with the command that works here if Anneal does not run on this system, else ""."""
    if sys.platform == "linux":
        return ""
    name = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    return f"On {name} Anneal runs in a container: {CONTAINER}"


def checks(repository: Path, *, has_gpu: bool) -> list[Check]:
    """Return the checks of everything that set-up needs before it downloads anything.

    With an NVIDIA GPU, it installs CUDA's libraries too.
    """
    return [_system(), _python(), _processor(), _libraries(), _memory(), *_disks(repository, has_gpu=has_gpu)]


def report(found: list[Check]) -> str:
    """Return the checks as a small table, followed by one line for each that failed."""
    rows = [("", "needed", "found"), *((check.name, check.needed, check.found) for check in found)]
    lines = [f"  {name:<12}{needed:<43}{value}" for name, needed, value in rows]
    return "\n".join([*lines, *(f"{check.name}: {check.fix}" for check in found if check.fix)]) + "\n"


def is_suitable(python: str) -> bool:
    """Return whether this interpreter starts, has a supported version and can create virtual environments."""
    asked = "import sys, ensurepip, venv; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.returncode == 0 and tuple(map(int, done.stdout.split())) in PYTHONS


def suitable_pythons() -> list[str]:
    """Return the interpreters on the PATH that set-up could use, the oldest first."""
    paths = [shutil.which(f"python{major}.{minor}") for major, minor in PYTHONS]
    return [path for path in paths if path and is_suitable(path)]


def explain(error: OSError) -> str:
    """Return why a file or program of this folder could not be used, and the fix if another account owns it."""
    if not isinstance(error, PermissionError) or not error.filename:
        return str(error)
    path = Path(os.fsdecode(error.filename))
    found = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
    owner = found.stat().st_uid
    if owner == os.getuid():
        return f"{error.strerror}: {path}"
    return (
        f"{found} belongs to another account ({_name_of(owner)}). Run Anneal as that account, give the folder to yours "
        "with `chown -R`, or use a clone of your own."
    )


def _name_of(user: int) -> str:
    import pwd  # noqa: PLC0415  not on Windows

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"number {user}"


def _system() -> Check:
    architecture = ARCHITECTURES.get(platform.machine().lower())
    libc, version = platform.libc_ver()
    is_fit = sys.platform == "linux" and architecture and libc == "glibc" and _numbers(version) >= OLDEST_GLIBC
    found = f"{platform.system()}, {architecture or platform.machine()}, {libc or 'unknown libc'} {version}".rstrip()
    needed = f"Linux, x86-64 or arm64, glibc {'.'.join(map(str, OLDEST_GLIBC))}"
    return Check("system", needed, found, "" if is_fit else f"there are no wheels for it; use a container: {CONTAINER}")


def _python() -> Check:
    version = platform.python_version()
    fix = ""
    if sys.version_info[:2] not in PYTHONS:
        fix = f"install one of these versions and run make PYTHON=python{PYTHONS[-2][0]}.{PYTHONS[-2][1]}"
    elif importlib.util.find_spec("ensurepip") is None:
        version += " without venv"
        fix = f"sudo apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    return Check("Python", f"{PYTHONS_TEXT} with venv", version, fix)


def _processor() -> Check:
    needed = CPU_FEATURES.get(ARCHITECTURES.get(platform.machine().lower(), ""), ())
    present = set(_read("/proc/cpuinfo").split())
    missing = [name for name in needed if name not in present]
    extra = [name for name in ("avx512f", "avx512_bf16", "amx_bf16", "bf16") if name in present]
    found = f"no {', '.join(missing)}" if missing else ", ".join([*needed, *extra])
    fix = "torch and vLLM have no build for this processor: use another machine" if missing else ""
    return Check("processor", ", ".join(needed) or "x86-64 or arm64", found, fix)


def _libraries() -> Check:
    missing = [name for name in LIBRARIES if not _loads(name)]
    packages = " ".join(LIBRARIES[name] for name in missing)
    fix = f"sudo apt-get install {packages} (Fedora: the packages with {', '.join(missing)})" if missing else ""
    return Check("libraries", ", ".join(LIBRARIES), f"no {', '.join(missing)}" if missing else "all", fix)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _memory() -> Check:
    free = free_memory_bytes()
    fix = "" if free >= MEMORY_BYTES else "close other programs, or raise the container's limit"
    return Check("memory", f"{MEMORY_BYTES / GB:.0f} GB free", f"{free / GB:.1f} GB free", fix)


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory for new processes: the machine's, within the container's limit if there is one."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"))
    free = [int(available[1]) * 1024] if available else []
    for folder, limit, used, cached in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        group = root / "sys/fs/cgroup" / folder
        limit_text, used_text = (_read(group / name).strip() for name in (limit, used))
        if limit_text.isdigit() and used_text.isdigit():
            # The kernel counts files that it keeps in memory as used, and drops them when a program needs the room.
            dropped = re.search(rf"^{cached} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
            free.append(int(limit_text) - int(used_text) + (int(dropped[1]) if dropped else 0))
    return max(0, min(free, default=0))


def _disks(repository: Path, *, has_gpu: bool) -> list[Check]:
    names = [os.environ.get(name) for name in ("UV_CACHE_DIR", "PIP_CACHE_DIR", "XDG_CACHE_HOME")]
    kept = Path(next(filter(None, names), os.path.expanduser("~/.cache"))).absolute()
    cache = next(folder for folder in (kept, *kept.parents) if os.path.exists(folder))
    more = GPU_BYTES if has_gpu else 0
    wanted = [("disk", repository, DISK_BYTES + more)]
    if cache.stat().st_dev != repository.stat().st_dev:
        wanted.append(("cache", cache, CACHE_BYTES + more))
    found = []
    for name, folder, needed in wanted:
        free = shutil.disk_usage(folder).free
        fix = f"make room on the disk of {folder}" + (", or set PIP_CACHE_DIR" if name == "cache" else "")
        text = f"{free / GB:.1f} GB free in {folder}"
        found.append(Check(name, f"{needed / GB:.0f} GB free", text, "" if free >= needed else fix))
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _read(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
