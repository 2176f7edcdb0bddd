"""The library of C kernels: compiled when it is first needed, kept in the user's cache, loaded through ctypes.

    which instructions?  ─► flags ─┐
    which compiler?  ──────────────┼─► name of the file ─► exists? load it : compile beside it, rename, load
    the C files  ──────────────────┘

Owns instruction sets, flags, the cache folder and the C signatures. If anything is missing, the result is not an error
but a NoLibrary with the reason, and plain torch is used instead. Does not know tensors.

The file's name is a hash of everything that shapes it: a changed source, another compiler or another CPU in the same
home folder makes another file. Two processes that compile at the same time each rename a complete file into place.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shoal.core.names import pick
from shoal.kernels.cpu.structs import size_mismatch

log = logging.getLogger(__name__)
_spare: Path | None = None  # see keep_in

SOURCE = Path(__file__).with_name("native.c")  # includes the others
VARIABLE = "SHOAL_CPU_KERNELS"
LEVELS = ("auto", "amx", "avx512", "avx2", "neon", "portable", "off")
COMPILE_TIMEOUT_S = 600  # with many neighbours 120 were too few, and plain torch would be slower all day

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c")
# the CPU features that a level needs; best first
NEEDS = {
    "amx": ("amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", *_AVX512),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma", "f16c"),
    "neon": ("asimd",),
    "portable": (),
}
# further features that a level uses if the CPU has them, and the compiler's flags for them
EXTRAS = {
    "avx512": {"avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni"},
    "avx2": {"avx_vnni": "-mavxvnni"},
    "neon": {"asimdhp": "+fp16", "asimddp": "+dotprod", "bf16": "+bf16"},
}
# no feature of Linux's, but the maker: on its CPUs the dot products of avx512_bf16 have half the rate of float32's, so
# that widened weights are faster; where they have tiles, those are faster still
INTEL = "(intel)"
# the compiler's names that differ from Linux's
FLAGS = {"amx_tile": "amx-tile", "amx_bf16": "amx-bf16", "amx_int8": "amx-int8"} | {
    name: name.replace("_", "") for name in ("avx512_bf16", "avx512_vnni")
}

_EXPORTED = re.compile(r"^API (\w+) (shoal_\w+)\(([^)]*)\)", re.MULTILINE)
_TYPES = {"void": None, "int": ctypes.c_int, "long": ctypes.c_long, "float": ctypes.c_float}


@dataclass(frozen=True)
class Library:
    """The loaded library, and how it was compiled."""

    calls: ctypes.CDLL
    level: str
    flags: tuple[str, ...]
    compiler: str
    path: Path
    note: str = ""
    """Why it is not of a better level."""

    @property
    def lanes(self) -> int:
        """float32 values in one vector."""
        return int(self.calls.shoal_lanes())

    @property
    def has_float16(self) -> bool:
        return bool(self.calls.shoal_has_float16())

    @property
    def bfloat16_products(self) -> str:
        """How bfloat16 weights are multiplied."""
        if self.calls.shoal_has_tiles():
            return "tiles"
        return "dot products" if self.calls.shoal_has_pairs() else "widened"

    def __str__(self) -> str:
        return f"C kernels, {self.level}{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True)
class NoLibrary:
    """No library, and the reason."""

    reason: str

    def __str__(self) -> str:
        return f"plain torch: {self.reason}"


@cache
def cpu_features() -> frozenset[str]:
    """The CPU's features by their Linux names; on other systems only those that every such CPU has. And INTEL."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    maker: tuple[str, ...] = ()
    for line in lines:
        name, _, values = line.partition(":")
        if name.strip() == "vendor_id" and values.strip() == "GenuineIntel":
            maker = (INTEL,)
        if name.strip() in ("flags", "Features"):
            return frozenset((*values.split(), *maker))
    return frozenset({"asimd"} if is_arm() else ())


def is_arm() -> bool:
    return platform.machine() in ("aarch64", "arm64")


def usable_levels(features: frozenset[str]) -> list[str]:
    """Best first."""
    return [level for level, needed in NEEDS.items() if features.issuperset(needed)]


def flags_for(level: str, features: frozenset[str]) -> tuple[str, ...]:
    """The compiler's flags for a level on this CPU."""
    slow = {"avx512_bf16"} if INTEL in features else set()
    extras = [flag for name, flag in EXTRAS.get(level, {}).items() if name in features and name not in slow]
    if level == "neon":
        return (f"-march=armv8.2-a{''.join(extras)}",) if extras else ("-march=armv8-a",)
    if level == "portable":
        return ()
    return (*(f"-m{FLAGS.get(name, name)}" for name in NEEDS[level]), *extras)


def find(level: str = "auto") -> Library | NoLibrary:
    """The library of this level; auto: the level in the environment, else the best that this CPU has."""
    if level == "auto":
        level = os.environ.get(VARIABLE) or "auto"
    pick(dict.fromkeys(LEVELS), level, "CPU kernels")
    if level == "off":
        return NoLibrary("switched off")
    usable = usable_levels(cpu_features())
    if level == "auto":
        level = usable[0]
    if level not in usable:
        return NoLibrary(f"this CPU has no {level}; it has {', '.join(usable)}")
    found = _load(level, _compiler())
    if level != "amx" or isinstance(found, Library):
        return found
    next_best = _load("avx512", _compiler())  # the system refuses the registers, or the compiler is too old
    return replace(next_best, note=f"no amx: {found.reason}") if isinstance(next_best, Library) else next_best


def _compiler() -> str | None:
    wanted = os.environ.get("CC", "").strip()
    return next(filter(None, map(shutil.which, [wanted] if wanted else ["cc", "gcc", "clang"])), None)


@cache
def _load(level: str, compiler: str | None) -> Library | NoLibrary:
    if sys.platform == "win32":
        return NoLibrary("the C kernels are not built on Windows")
    if compiler is None:
        return NoLibrary("no C compiler was found; install gcc or clang, or set CC")
    flags = flags_for(level, cpu_features())
    try:
        path = _compiled(compiler, flags)
        calls = _opened(path)
        mismatch = size_mismatch(calls)
        if mismatch:
            log.warning("%s does not fit this version: %s; using plain torch, which is slower", path, mismatch)
            return NoLibrary(f"{path} does not fit this version of Shoal: {mismatch}; delete the file")
        refused = calls.shoal_permitted()
        if refused:
            return NoLibrary(f"the system does not grant the AMX registers: {os.strerror(refused)}")
        return Library(calls, level, flags, compiler, path)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        reason = f"{compiler} could not compile the C kernels: {' '.join(detail.split())[:300]}"
        log.warning("%s; %s", reason, "trying avx512" if level == "amx" else "using plain torch, which is slower")
        return NoLibrary(reason)


def _compiled(compiler: str, flags: tuple[str, ...]) -> Path:
    version = _run([compiler, "--version"]).splitlines()[0]
    is_gcc = "clang" not in version.lower()
    # No -ffast-math: it would flush denormals in the whole process. Products and sums are fused only where the source
    # does it explicitly, so that tiles of all sizes round alike. gcc's first scheduling pass needs more registers than
    # there are; the spills would cost a third of the speed.
    all_flags = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden", *flags]
    all_flags += ["-fno-schedule-insns"] if is_gcc else []
    sources = [path.read_text() for path in sorted(SOURCE.parent.glob("*.c"))]
    made_from = [*sources, version, platform.machine(), *sorted(cpu_features()), *all_flags]
    name = hashlib.sha256("\n".join(made_from).encode()).hexdigest()[:24]
    folder = cache_folder()
    path = folder / f"kernels-{name}.so"
    if not path.exists():
        log.info("compiling the CPU kernels with %s", compiler)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".so")
        os.close(handle)
        try:
            _run([compiler, *all_flags, str(SOURCE), "-o", temporary, "-lm"])
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return path


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
    return done.stdout


def keep_in(folder: Path) -> None:
    """Set the folder for the library if the home folder is not writable: one that outlives this process, so that a
    restarted process finds the library."""
    global _spare
    _spare = folder


def cache_folder() -> Path:
    """A folder that only this user can write to, because code is loaded from it: in the home folder, or, if that is not
    writable, the spare one (keep_in), or else one for this process."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    with contextlib.suppress(OSError, RuntimeError):  # no home folder
        folder = Path(base).expanduser() / "shoal"
        folder.parent.mkdir(parents=True, exist_ok=True)
        if _is_ours_alone(folder):
            return folder
    if _spare is not None and _is_ours_alone(_spare):
        return _spare
    return Path(_own_folder())


def _is_ours_alone(folder: Path) -> bool:
    """Whether it exists or can be made, and only this user can write to it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(folder, os.W_OK)


@cache
def _own_folder() -> str:
    import atexit

    folder = tempfile.mkdtemp(prefix="shoal-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def signatures(source: str) -> dict[str, tuple[type | None, list[type]]]:
    """Of the functions that C source exports: name → (type of the result, types of the arguments).

    >>> signatures("API int shoal_sum(const float *x, long n, int threads) {")["shoal_sum"][1][1:]
    [<class 'ctypes.c_long'>, <class 'ctypes.c_int'>]
    """
    found: dict[str, tuple[type | None, list[type]]] = {}
    for result, name, arguments in _EXPORTED.findall(source):
        given = [] if arguments.strip() in ("", "void") else arguments.split(",")
        kinds = [ctypes.c_void_p if "*" in one else _TYPES[one.split()[-2]] for one in given]
        found[name] = (_TYPES[result], [kind for kind in kinds if kind is not None])
    return found


def _opened(path: Path) -> ctypes.CDLL:
    calls = ctypes.CDLL(str(path))
    for source in sorted(SOURCE.parent.glob("*.c")):
        for name, (result, arguments) in signatures(source.read_text()).items():
            function = getattr(calls, name)
            function.argtypes, function.restype = arguments, result
    return calls
