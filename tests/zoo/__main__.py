"""Run the zoo: ``python -m tests.zoo --report``; see docs/zoo.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

from tests.zoo import collection, injecting
from tests.zoo.case import Draw
from tests.zoo.judging import Row, judge_bug, judge_legal
from tests.zoo.recording import LIMIT_S, Recordings, View
from tests.zoo.report import document, table


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--report", action="store_true", help="print the table at the end")
    parser.add_argument("--draw", type=int, action="append", metavar="SEED", help="repeatable; default 0")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="cases by name; repeatable"
    )
    parser.add_argument("--bugs", action="store_true", help="planted mistakes only")
    parser.add_argument("--legal", action="store_true", help="legal pairs only")
    parser.add_argument("--inject", action="store_true", help="put an error of 1 %% into legal pairs, too")
    parser.add_argument("--view", choices=get_args(View), default="full", help="what is recorded")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep traces, and use those kept there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of a recording or diff"
    )
    parser.add_argument(
        "--fork",
        action="store_true",
        help="fork all processes from one that has imported torch: much quicker",
    )
    parser.add_argument("--list", action="store_true", help="list the cases and run nothing")
    return parser.parse_args(given)


def rows_of(options: argparse.Namespace, folder: Path, tell: Callable[[Row], None]) -> list[Row]:
    """Run the cases that the options select, and return a row of each, in the order of the files."""
    assert not (options.fork and options.jobs > 1), "--fork forks from one thread: --jobs 1"
    recordings = Recordings(folder, options.view, options.limit, options.fork)
    tasks: list[Callable[[], Row]] = []
    for draw in map(Draw, options.draw or [0]):
        if not options.legal:
            tasks += [lambda c=c, d=draw: judge_bug(c, d, recordings) for c in collection.bugs(options.only)]
        if not options.bugs:
            pairs = collection.legal_pairs(options.only)
            tasks += [lambda c=c, d=draw: judge_legal(c, d, recordings) for c in pairs]
            if options.inject:
                tasks += [lambda c=c, d=draw: injecting.judge(c, d, recordings) for c in pairs]

    def told(task: Callable[[], Row]) -> Row:
        row = task()
        tell(row)
        return row

    if options.jobs == 1:
        return list(map(told, tasks))
    with ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(told, tasks))


def main() -> int:
    options = arguments()
    if options.list:
        for case in [*collection.bugs(options.only), *collection.legal_pairs(options.only)]:
            print(f"{case.name}: {case.story}")
        return 0

    def tell(row: Row) -> None:
        mark = "  " if row.right else "! "
        print(f"{mark}{row.kind} {row.name} ({row.draw}): {row.said} {row.found} {row.code}", file=sys.stderr)
        for line in [] if row.right else [f"expected {row.expected}", *row.detail.splitlines(), *row.traces]:
            print(f"    {line}", file=sys.stderr)
        sys.stderr.flush()

    with tempfile.TemporaryDirectory(prefix="zoo") as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        rows = rows_of(options, folder, tell)
    if options.report:
        print(table(rows))
    if options.json:
        options.json.write_text(document(rows))
    return 0 if rows and all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
