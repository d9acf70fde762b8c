"""Where a result comes from: what has to be known to get it again (versions, device, code, configuration, seeds)."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pagedjax

if TYPE_CHECKING:
    from pagedjax.engine import Engine

# What is not declared, or only in an extra, and changes results or speed where it is installed.
_ALSO = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "torch")


def provenance(
    configuration: Mapping[str, Any], seeds: Mapping[str, int], device: Any = None
) -> dict[str, dict[str, Any] | None]:
    """The record that goes into a result file: JSON-able, and equal for equal runs (it holds no time of day).

    Args:
        configuration: everything that was set, JSON-able.
        seeds: by what they are the seeds of.
        device: the `jax.Device` that computed; None if none did.

    Returns:
        {"packages", "machine", "device", "git", "configuration", "seeds"}; "device" and "git" may be None.
    """
    return {
        "packages": package_versions(),
        "machine": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": num_cpu_cores(),
        },
        "device": None if device is None else device_record(device),
        "git": git_state(Path(pagedjax.__file__)),
        "configuration": dict(configuration),
        "seeds": dict(seeds),
    }


def engine_provenance(engine: Engine, how: Mapping[str, Any], seeds: Mapping[str, int]) -> dict[str, Any]:
    """The record of what an engine did: its whole configuration, as resolved, beside `how` it was used."""
    import jax

    configuration = {
        "model": engine.source,
        "engine": asdict(engine.config),
        "num_blocks": engine.pool_info.num_blocks,
        "max_model_len": engine.max_model_len,
        "attention_backend": engine.runner.programs.backend.name,
        **how,
    }
    device = next(iter(jax.tree.leaves(engine.params)[0].devices()))
    return provenance(configuration, {**seeds, "engine": engine.config.seed}, device)


def package_versions() -> dict[str, str]:
    """Versions of this package and of what it runs on, by name."""
    try:
        declared = metadata.requires("pagedjax") or []
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        declared = []
    names = [re.split(r"[^\w-]", line)[0] for line in declared if "extra ==" not in line]
    found = {}
    for name in sorted({*names, *_ALSO}):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"pagedjax": pagedjax.__version__, **found}


def device_record(device: Any) -> dict[str, Any]:
    """What a `jax.Device` is, and how many of its kind there are."""
    return {"platform": device.platform, "kind": device.device_kind, "count": device.client.device_count()}


def git_state(file: Path) -> dict[str, Any] | None:
    """Commit of the checkout that tracks `file`, and whether the whole tree was as committed; None if none does."""
    folder = file.resolve().parent

    def git(*args: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *args]  # many may ask at the same time
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # an environment inside another project's checkout is not it
        return {"commit": git("rev-parse", "HEAD"), "clean": not git("status", "--porcelain")}
    except (OSError, subprocess.SubprocessError):
        return None


def num_cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor()
