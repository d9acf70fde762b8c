"""The report: one table of all claims, and for each experiment its figure and the command that makes it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.frame.claims import Claim
from experiments.frame.experiment import Experiment, find_experiment
from experiments.frame.frames import to_frame
from experiments.frame.plots import drawn
from experiments.frame.store import Run, Store, finished_records
from experiments.frame.tasks import Task

_COLUMNS = ("claim", "where", "paper", "seed", "ours", "accepted", "verdict", "how", "lengths")


@dataclass(frozen=True)
class Section:
    """What an experiment's part of the report is made of.

    Attributes:
        runs: of its CPU set, as far as they are in the store.
        missing: configurations of its CPU set that are not, or have failed.
        claims: from the records of `runs`.
    """

    experiment: Experiment
    runs: list[Run]
    missing: list[Task]
    claims: list[Claim]

    @classmethod
    def of(cls, experiment: Experiment, store: Store) -> Section:
        """What the store has."""
        runs, missing = [], []
        for config in experiment.cpu_set:
            task = Task.of(experiment, config)
            run = store.run_of(task)
            if run is not None and run.is_finished:
                runs.append(run)
            else:
                missing.append(task)
        claims = experiment.claims(to_frame(finished_records(runs))) if runs else []
        return cls(experiment, runs, missing, claims)


def write_report(names: Sequence[str], store: Store, folder: Path) -> list[Section]:
    """Writes REPORT.md and the figures into a folder; gives what they were made of."""
    sections = [Section.of(find_experiment(name), store) for name in names]
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for section in sections:
        _write_figures(section, figures)
    part = folder / "REPORT.md.part"
    part.write_text("\n".join(_lines(sections)) + "\n", encoding="utf-8")
    os.replace(part, folder / "REPORT.md")
    return sections


def _write_figures(section: Section, folder: Path) -> None:
    if not section.runs:
        return
    records, name = to_frame(finished_records(section.runs)), section.experiment.name
    png, svg = drawn(section.experiment.plot, records, "png", "svg")
    (dark,) = drawn(section.experiment.plot, records, "png", dark=True)
    for file, data in ((f"{name}.png", png), (f"{name}.svg", svg), (f"{name}-dark.png", dark)):
        (folder / file).write_bytes(data)


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
    yield "; ".join(f"{number} {verdict}" for verdict, number in counts.most_common()) + "."
    yield ""
    yield f"Made with {_origin(sections)}"
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
    manifests = [run.manifest for section in sections for run in section.runs]
    commits = {
        f"{git['commit'][:12]}{'' if git['clean'] else ' with changes that were not committed'}"
        for manifest in manifests
        if (git := manifest["git"]) is not None
    }
    parts.append(f"commit {', '.join(sorted(commits))}" if commits else "code that was in no repository")
    for name in ("pagedjax", "jax", "numpy"):
        versions = {manifest["packages"].get(name) for manifest in manifests} - {None}
        parts.append(f"{name} {', '.join(sorted(versions))}")
    machines = {f"{m['machine']['cores']} cores of {m['machine']['processor']}" for m in manifests}
    return ", ".join([*parts, *sorted(machines)]) + "."


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
            f"**{claim.verdict}**" if claim.verdict == "not reproduced" else claim.verdict,
            claim.how or "-",
            claim.lengths or "-",
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _section_lines(section: Section) -> Iterable[str]:
    experiment = section.experiment
    yield f"## {experiment.name}"
    yield ""
    yield experiment.title
    yield ""
    yield f"`python -m experiments reproduce --only {experiment.name}`"
    yield ""
    if section.runs:
        yield "<picture>"
        yield f'  <source media="(prefers-color-scheme: dark)" srcset="figures/{experiment.name}-dark.png">'
        yield f'  <img src="figures/{experiment.name}.png" alt="{experiment.title}">'
        yield "</picture>"
    for task in section.missing:
        yield f"- no records: `{task.label}`"
    notes = {note for run in section.runs for record in run.records() for note in [record.get("note")] if note}
    for note in sorted(notes):
        yield f"- {note}"
