"""The report: one table of all claims, and for each experiment its figure and the command that makes it."""

from __future__ import annotations

import gzip
import html
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.frame.claims import NOT_REPRODUCED, Claim
from experiments.frame.experiment import Experiment
from experiments.frame.frames import Recorded, to_frame
from experiments.frame.plots import drawn
from experiments.frame.runs import DamagedRun, Run
from experiments.frame.store import Store
from experiments.frame.tasks import Task
from experiments.frame.values import keys_of, said
from pagedjax.errors import PagedJaxError

RECORDS_FILE = "records.json.gz"

_COLUMNS = ("claim", "where", "paper", "seed", "ours", "accepted", "verdict", "how", "lengths")


@dataclass(frozen=True)
class Section:
    """What an experiment's part of the report is made of.

    Attributes:
        runs: manifests of its CPU set's runs, as far as they are finished.
        recorded: their configurations and records.
        missing: the others, and why.
        notes: of the records.
        claims: from the records.
        figures: of the records, as files by name.
        problems: what could not be made of the records.
    """

    experiment: Experiment
    runs: list[dict[str, Any]] = field(default_factory=list)
    recorded: list[Recorded] = field(default_factory=list)
    missing: list[tuple[Task, str]] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)
    claims: list[Claim] = field(default_factory=list)
    figures: dict[str, bytes] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, experiment: Experiment, store: Store) -> Section:
        """What the store has."""
        section = cls(experiment)
        for config in experiment.cpu_set:
            task = Task.of(experiment, config)
            try:
                run = store.run_of(task)
                if run is not None and run.is_finished:
                    section.recorded.append((run.values, run.records()))
                    section.runs.append(run.manifest)
                else:
                    section.missing.append((task, _why(run)))
            except DamagedRun as error:
                section.missing.append((task, str(error)))
                section.problems.append(f"{experiment.name} {task.label}: {error}")
        section.notes.update(
            str(note) for _, records in section.recorded for each in records if (note := each.get("note"))
        )
        section._evaluate(to_frame(section.recorded, keys_of(experiment.config_class)))
        return section

    def _evaluate(self, records: Any) -> None:
        """Fills in claims and figures. Those of an experiment may need records that are not there."""
        without = f" ({len(self.missing)} configurations have no records)" if self.missing else ""
        try:
            self.claims.extend(_checked(self.experiment.claims(records)))
        except Exception as error:
            self.problems.append(f"{self.experiment.name}: its claims cannot be computed{without}: {said(error)}")
        if not self.runs:
            return
        name, plot = self.experiment.name, self.experiment.plot
        try:
            png, svg = drawn(plot, records, "png", "svg")
            (dark,) = drawn(plot, records, "png", dark=True)
        except Exception as error:
            self.problems.append(f"{name}: its figure cannot be drawn{without}: {said(error)}")
        else:
            self.figures.update({f"{name}.png": png, f"{name}.svg": svg, f"{name}-dark.png": dark})


def _why(run: Run | None) -> str:
    return "not run" if run is None else f"failed: {run.manifest.get('error', 'it does not say why')}"


def _checked(claims: list[Claim]) -> list[Claim]:
    """Claims that have a verdict, or an error: their figures are whatever an experiment computed."""
    for claim in claims:
        _ = claim.verdict, claim.figure, claim.accepted
    return claims


def write_report(sections: Sequence[Section], folder: Path) -> None:
    """Writes REPORT.md, its figures, and the records that it was made of into a folder.

    Raises:
        PagedJaxError: the folder cannot be written.
    """
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        for section in sections:
            for name, data in section.figures.items():
                _write(folder / "figures" / name, data)
        _write(folder / RECORDS_FILE, _packed(sections))
        _write(folder / "REPORT.md", ("\n".join(_lines(sections)) + "\n").encode())
    except OSError as error:
        raise PagedJaxError(f"the report cannot be written into {folder} ({error.strerror or error})") from error


def _packed(sections: Sequence[Section]) -> bytes:
    """All records with their configurations, by experiment: what claims and figures can be made of again."""
    records = {section.experiment.name: section.recorded for section in sections}
    return gzip.compress(json.dumps(records, separators=(",", ":")).encode(), mtime=0)


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _lines(sections: Sequence[Section]) -> Iterable[str]:
    counts = Counter(claim.verdict for section in sections for claim in section.claims)
    yield "# What of the paper is reproduced, and what is not"
    yield ""
    yield (
        "Made by `make reproduce`, from records alone. *Ours* is computed from them by the code of the experiment; "
        "*accepted* is what was laid down before as the same. *Lengths* says whether requests had the real lengths of "
        "the workload (for ShareGPT the paper's own) or those of the statistics that pagedjax ships. A figure marked † "
        "measures time, and is another one each time; all others come out the same."
    )
    yield ""
    yield ("; ".join(f"{number} {verdict}" for verdict, number in counts.most_common()) or "No claims") + "."
    yield ""
    yield _origin(sections)
    yield ""
    yield "## All claims"
    yield ""
    yield from _table((claim, section.experiment.name) for section in sections for claim in section.claims)
    yield ""
    yield "## Where the seed note and the paper are to be told apart"
    yield ""
    yield "What the seed note says, what the paper says of it, and what we measured."
    yield ""
    yield from _table((c, s.experiment.name) for s in sections for c in s.claims if c.seed is not None)
    for section in sections:
        yield ""
        yield from _section_lines(section)


def _origin(sections: Sequence[Section]) -> str:
    """Versions, machine and commit of the runs; there may be several."""
    parts = []
    manifests = [manifest for section in sections for manifest in section.runs]
    if not manifests:
        return "Nothing has been run."
    commits = {
        f"{git['commit'][:12]}{'' if git['clean'] else ' with changes that were not committed'}"
        for manifest in manifests
        if (git := manifest["git"]) is not None
    }
    parts.append(f"commit {', '.join(sorted(commits))}" if commits else "code that was in no repository")
    for name in ("pagedjax", "jax", "numpy"):
        versions = {manifest["packages"].get(name) for manifest in manifests} - {None}
        if versions:
            parts.append(f"{name} {', '.join(sorted(versions))}")
    machines = {f"{m['machine']['cores']} cores of {m['machine']['processor']}" for m in manifests}
    return f"Made with {', '.join([*parts, *sorted(machines)])}."


def _table(rows: Iterable[tuple[Claim, str]]) -> Iterable[str]:
    yield "| " + " | ".join(_COLUMNS) + " |"
    yield "| " + " | ".join("---" for _ in _COLUMNS) + " |"
    for claim, name in rows:
        cells = (
            f"[{claim.text}](#{name})",
            claim.source,
            claim.paper or "-",
            claim.seed or "-",
            claim.figure + ("†" if claim.timed else ""),
            claim.accepted,
            f"**{claim.verdict}**" if claim.verdict == NOT_REPRODUCED else claim.verdict,
            claim.how or "-",
            claim.lengths or "-",
        )
        yield "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def _section_lines(section: Section) -> Iterable[str]:
    experiment = section.experiment
    yield f"## {experiment.name}"
    yield ""
    yield experiment.title
    yield ""
    yield f"`python -m experiments reproduce --only {experiment.name}`"
    yield ""
    if section.figures:
        yield "<picture>"
        yield f'  <source media="(prefers-color-scheme: dark)" srcset="figures/{experiment.name}-dark.png">'
        yield f'  <img src="figures/{experiment.name}.png" alt="{html.escape(experiment.title)}">'
        yield "</picture>"
        yield ""
    for task, why in section.missing:
        yield f"- no records: `{task.label}` ({why})"
    yield from (f"- {line}" for line in [*section.problems, *sorted(section.notes)])
