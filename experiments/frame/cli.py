"""`python -m experiments`: list, run, reproduce, report, compare."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from experiments.frame.executors import executor
from experiments.frame.experiment import (
    FOLDERS_VARIABLE,
    OWN_FOLDER,
    Experiment,
    find_all,
    find_experiment,
)
from experiments.frame.lengths import find_data
from experiments.frame.runs import StoreError
from experiments.frame.store import STORE_VARIABLE, Store, default_store
from experiments.frame.sweep import Sweep, Tally
from experiments.frame.tasks import Task
from experiments.frame.values import keys_of, kind_name, make_configs, parse_seeds, parse_settings, parse_sweeps
from pagedjax.cli.flags import add_json_flag, positive_int
from pagedjax.errors import ConfigError, PagedJaxError
from pagedjax.provenance import num_cpu_cores
from pagedjax.tables import format_table, write_json

RESULTS = OWN_FOLDER / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 if all went well, 1 if something failed or differs, 2 for a wrong argument."""
    find_data()
    args = _parser().parse_args(argv)
    try:
        status = args.command(args)
        sys.stdout.flush()
        return status
    except PagedJaxError as error:
        _told([str(error)])
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted: what is finished is kept, and the same command goes on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `... | head`: nobody reads on, and the interpreter must not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description="The paper's experiments, and sweeps.",
        epilog=f"{FOLDERS_VARIABLE} names more folders of experiments, {STORE_VARIABLE} the folder of the results.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("list", help="the experiments, or one with its keys")
    command.add_argument("name", nargs="?", metavar="NAME")
    add_json_flag(command)
    command.set_defaults(command=_list)

    command = commands.add_parser("run", help="run configurations of an experiment", allow_abbrev=False)
    command.add_argument("name", metavar="NAME")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the configuration")
    command.add_argument("--sweep", action="append", default=[], metavar="KEY=A,B,C", help="each of several values")
    command.add_argument("--seeds", metavar="0..4", help="each of several seeds: sweeps the key seed")
    _add_running(command)
    command.set_defaults(command=_run)

    command = commands.add_parser(
        "reproduce", help="run the CPU set of all experiments, and report", allow_abbrev=False
    )
    command.add_argument("--only", action="append", metavar="NAME", help="of this experiment; may be given again")
    _add_running(command)
    _add_results(command)
    command.set_defaults(command=_reproduce)

    command = commands.add_parser("report", help="write REPORT.md and its figures from the store")
    _add_store(command)
    _add_results(command)
    command.set_defaults(command=_report)

    command = commands.add_parser("compare", help="what differs between two runs, or two stores; 1 if records do")
    command.add_argument("first", metavar="RUN", help="a run's folder, experiment/hash or hash; or a whole store")
    command.add_argument("second", metavar="RUN")
    _add_store(command)
    add_json_flag(command)
    command.set_defaults(command=_compare)
    return parser


def _add_store(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--store",
        type=Path,
        metavar="FOLDER",
        help="of the results (default: PAGEDJAX_STORE, or experiments/results/store)",
    )


def _add_results(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="where REPORT.md goes (default: experiments/results; with --only, none is written)",
    )


def _add_running(command: argparse.ArgumentParser) -> None:
    _add_store(command)
    command.add_argument(
        "--jobs",
        type=positive_int,
        metavar="N",
        help="configurations at the same time (default: one a core; with Ray, one a CPU of the cluster)",
    )
    command.add_argument(
        "--executor", choices=("local", "ray"), default="local", help="processes of this machine, or a Ray cluster"
    )
    command.add_argument("--address", metavar="ADDRESS", help="of the Ray cluster; without it, one is started here")
    command.add_argument("--force", action="store_true", help="run also what is finished")
    command.add_argument("--profile", action="store_true", help="write a trace of jax.profiler into each run's folder")


# ---------------------------------------------------------------------- commands


def _list(args: argparse.Namespace) -> int:
    wrong: list[str] = []
    if args.name is None:
        found, wrong = find_all()
        rows = [{"experiment": each.name, "runs": len(each.cpu_set), "what": each.title} for each in found]
    else:
        rows = _key_rows(find_experiment(args.name))
    print(format_table(rows))
    if args.json:
        write_json(args.json, rows)
    return _told(wrong)


def _told(problems: Sequence[str]) -> int:
    """Says what is wrong; the exit status."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _key_rows(experiment: Experiment) -> list[dict[str, object]]:
    kinds, texts, rows = keys_of(experiment.config_class), experiment.help_texts(), []
    for field in fields(experiment.config_class):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        shown = "(none: to be given)" if default is MISSING else str(default)  # as it is written after --set
        rows.append(
            {"key": field.name, "type": kind_name(kinds[field.name]), "default": shown, "what": texts[field.name]}
        )
    return rows


def _run(args: argparse.Namespace) -> int:
    experiment = find_experiment(args.name)
    settings = parse_settings(experiment.config_class, args.set)
    sweeps = parse_sweeps(experiment.config_class, args.sweep)
    if args.seeds is not None:
        if "seed" not in keys_of(experiment.config_class):
            raise ConfigError(f"--seeds: {experiment.name} has no key seed")
        if "seed" in sweeps:
            raise ConfigError("seed is both swept and given by --seeds")
        sweeps["seed"] = parse_seeds(args.seeds)
    configs = make_configs(experiment.config_class, settings, sweeps)
    store = _store(args)
    tally = _run_all(args, store, [(experiment, config) for config in configs])
    print(f"results: {store.path / experiment.name}")
    return 1 if tally.failed else 0


def _reproduce(args: argparse.Namespace) -> int:
    found, wrong = find_all() if args.only is None else (list(map(find_experiment, dict.fromkeys(args.only))), [])
    tally = _run_all(args, _store(args), [(each, config) for each in found for config in each.cpu_set])
    folder = args.results or (RESULTS if args.only is None else None)  # a part does not take the place of the whole
    return max(_show_report(found, wrong, _store(args), folder), 1 if tally.failed else 0)


def _report(args: argparse.Namespace) -> int:
    return _show_report(*find_all(), _store(args), args.results or RESULTS, whole=args.results is None)


def _show_report(
    found: Sequence[Experiment], wrong: Sequence[str], store: Store, folder: Path | None, whole: bool = False
) -> int:
    """Prints its claims, writes it if there is a folder for it, and says what is wrong with files and records.

    Args:
        whole: whether it is refused if records are missing: it would take the place of one that has them.
    """
    from experiments.frame.report import Section, write_report

    sections = [Section.of(experiment, store) for experiment in found]
    missing = sum(len(section.missing) for section in sections)
    if whole and missing:
        total = missing + sum(len(section.runs) for section in sections)
        raise StoreError(
            f"{store.path} has no records of {missing} of the {total} configurations that the report is of: run "
            "`python -m experiments reproduce`, or give a folder for a part of it with --results"
        )
    if folder is not None:
        write_report(sections, folder)
    rows = [
        {
            "claim": claim.text,
            "paper": claim.paper,
            "ours": claim.figure,
            "accepted": claim.accepted,
            "verdict": claim.verdict,
        }
        for section in sections
        for claim in section.claims
    ]
    print(format_table(rows) if rows else "no claims")
    if folder is not None:
        print(f"report: {folder / 'REPORT.md'}")
    if missing:
        print(f"{missing} configurations have no records: the report says which, and why")
    return _told([*wrong, *(problem for section in sections for problem in section.problems)])


def _compare(args: argparse.Namespace) -> int:
    from experiments.frame.compare import compare, results_differ

    try:
        rows = compare(args.first, args.second, _store(args))
    except StoreError as error:  # 1 says that results differ
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_table(rows) if rows else "no difference")
    if args.json:
        write_json(args.json, rows)
    return 1 if results_differ(rows) else 0


# ---------------------------------------------------------------------- running


def _store(args: argparse.Namespace) -> Store:
    return Store(args.store or default_store())


def _run_all(args: argparse.Namespace, store: Store, configs: Sequence[tuple[Experiment, object]]) -> Tally:
    """Runs them: what measures time behind the rest, one at a time."""
    if args.address and args.executor != "ray":
        raise ConfigError(f"--address {args.address!r} is of a Ray cluster: it needs --executor ray")
    jobs = args.jobs or (num_cpu_cores() if args.executor == "local" else None)
    sweep = Sweep(store, args.force)
    for alone, number in ((False, jobs), (True, 1)):
        tasks = [Task.of(each, config, args.profile) for each, config in configs if each.runs_alone(config) is alone]
        if tasks:
            with executor(args.executor, jobs=number, address=args.address) as made:
                sweep.run(tasks, made)
    _print_tally(sweep.tally)
    return sweep.tally


def _print_tally(tally: Tally) -> None:
    found = f", {len(tally.found)} were finished already (--force runs them again)" if tally.found else ""
    failed = f", {len(tally.failed)} failed" if tally.failed else ""
    print(f"{len(tally.run)} run{found}{failed}")
    if tally.stale:
        print(f"note: {len(tally.stale)} of those finished were made by another version of the experiment's file")
    for task, error in tally.failed:
        print(f"failed: {task.name}/{task.hash} {task.label}: {error}")
