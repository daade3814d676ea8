"""How many programs the sandbox grades in a second, how soon one starts, and what it makes of MBPP's:

    python benchmarks/agents/sandbox.py

Rates: MBPP's reference programs with all their tests, graded by two worker processes as in training, each with a warm
interpreter of its own; with all protections that the system allows, and without namespaces. Start: from the order to the
answer of an empty program, one after the other. Processor time: of this process and all that descend from it, which other
work beside them changes little.

Verdicts: each reference has to pass. Of each, copies are made with one operator, comparison, constant or returned value
changed; what the sandbox says of them is compared with what Python says when it runs the program and its tests in one
process, without any protection.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.core.types import Reply, Task
from posttrain.envs.builtin.code import row_to_task
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.service_client import Services
from posttrain.envs.score_replies import score
from posttrain.sandbox import shared_sandbox
from posttrain.sandbox.host import DENIED, TELL
from posttrain.sandbox.limits import ProgramLimits
from posttrain.verify.test_cases import ComparedCase, Suite, read_tests
from posttrain.verify.unit_tests import Grade, graded

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "code" / "mbpp.jsonl"
SLOW = {123}  # task ids: a reference that takes 3 s of processor time by itself is no measure of the sandbox
NAIVE_SECONDS = 3
BRIEF = ProgramLimits(cpu=2, life=20.0)  # changed programs often loop without end


def rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def tests_of(row: dict[str, Any]) -> list[str]:
    return [*row["test_list"], *row["challenge_test_list"]]


# -- rates -------------------------------------------------------------------------------------------------------------


def starts(count: int) -> list[float]:
    """Milliseconds from the order of a program to its first answer."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        with shared_sandbox.shared().start() as program:
            program.run("")
            found.append(1000 * (time.perf_counter() - began))
            program.finish()
    return sorted(found)


def processor() -> float:
    """Seconds that this process, its descendants, and those of them that have ended, computed."""
    parents: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
        spent[int(path.parent.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    line, total = [os.getpid()], 0.0
    while line:
        process = line.pop()
        total += spent.get(process, 0.0)
        line += parents.get(process, [])
    return total


def rate(found: list[dict[str, Any]], workers: int) -> tuple[float, float]:
    """Correct programs in a second, and milliseconds of processor time for each."""
    asked: list[tuple[Task, Reply]] = []
    for row in found:
        if row["task_id"] not in SLOW and (task := row_to_task(row)) is not None:
            whole = {**task, "tests": tests_of(row)}
            asked.append((whole, Reply(task["response"])))
    with EnvPool("code", workers) as pool:
        pool.ready()
        assert all(done.reward == 1.0 for done in score(pool, Services(), asked[: 4 * workers]))  # sandboxes start
        began, before = time.perf_counter(), processor()
        rewards = [done.reward for done in score(pool, Services(), asked)]
        seconds, computed = time.perf_counter() - began, processor() - before
    assert rewards == [1.0] * len(asked), Counter(map(str, rewards))
    return len(asked) / seconds, 1000 * computed / len(asked)


def measure_rates(found: list[dict[str, Any]], workers: int, runs: int) -> None:
    print(
        "| protections | start, ms: median, 95%, most | programs a second, each run | median | processor time of one, ms |"
    )
    print("|---|---|---|---|---|")
    for told in ("", DENIED):
        os.environ[TELL] = told
        protections = str(shared_sandbox.shared().protections)
        took = starts(200)
        shared_sandbox.close()
        rates, computed = zip(*(rate(found, workers) for _ in range(runs)), strict=True)
        told_starts = f"{statistics.median(took):.1f}, {took[int(0.95 * len(took))]:.1f}, {took[-1]:.1f}"
        each = ", ".join(f"{r:.0f}" for r in rates)
        times = f"{min(computed):.1f} to {max(computed):.1f}"
        print(f"| {protections} | {told_starts} | {each} | {statistics.median(rates):.0f} | {times} |", flush=True)
    os.environ[TELL] = ""


# -- verdicts ----------------------------------------------------------------------------------------------------------

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def mutants(code: str) -> Iterator[tuple[str, str]]:
    """(kind, program): the reference with one thing changed."""
    tree = ast.parse(code)
    for place, node in enumerate(ast.walk(tree)):
        for kind, change in _changes(node):
            other = copy.deepcopy(tree)
            change(next(n for i, n in enumerate(ast.walk(other)) if i == place))
            yield kind, ast.unparse(ast.fix_missing_locations(other))


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPPED:
        yield "operator", lambda n: setattr(n, "op", _SWAPPED[type(n.op)]())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        yield "comparison", lambda n: n.ops.__setitem__(0, _SWAPPED[type(n.ops[0])]())
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant", lambda n: setattr(n, "value", n.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "returned value", lambda n: setattr(n, "value", ast.List([n.value, ast.Constant("no")], ast.Load()))


_NAIVE = """
import json, signal, sys
signal.alarm(%d)
sys.stdout, out = open("/dev/null", "w"), sys.stdout
code, setup, tests = json.load(sys.stdin)
space, passed = {"__name__": "__program__"}, []
try:
    exec(code, space)
    exec(setup, space)
    for test in tests:
        try:
            exec(test, space)
            passed.append(True)
        except Exception:
            passed.append(False)
except BaseException:
    pass
json.dump(passed + [False] * (len(tests) - len(passed)), out)
"""


def naive(code: str, setup: str, tests: list[str]) -> list[bool] | None:
    """What Python says when program and tests share a process; None: it took too long, or crashed."""
    ran = subprocess.run(
        [sys.executable, "-I", "-c", _NAIVE % NAIVE_SECONDS], input=json.dumps([code, setup, tests]),
        capture_output=True, text=True, env={"PYTHONHASHSEED": "0"},
    )  # fmt: skip
    return json.loads(ran.stdout) if ran.returncode == 0 else None


def measure_verdicts(found: list[dict[str, Any]], each: int) -> None:
    cases, passing = Counter[str](), 0
    for row in found:
        read = read_tests(tests_of(row), row["test_setup_code"])
        assert isinstance(read, Suite)
        cases.update("taken apart" if isinstance(case, ComparedCase) else "played" for case in read.cases)
        grade = graded(row["code"], tests_of(row), row["test_setup_code"])
        passing += isinstance(grade, Grade) and all(grade.passed)
    print(
        f"\n{sum(cases.values())} tests, of which {cases['taken apart']} are taken apart and {cases['played']} played"
    )
    print(f"references that pass all of their tests: {passing} of {len(found)}", flush=True)
    chosen: list[tuple[dict[str, Any], str, str]] = []
    for row in found:
        if row["task_id"] not in SLOW:
            some = list(mutants(row["code"].replace("\r", "")))
            rng = random.Random(row["task_id"])
            chosen += [(row, kind, code) for kind, code in rng.sample(some, min(each, len(some)))]
    counts: dict[str, Counter[str]] = {}
    with ThreadPoolExecutor(2) as pool:
        for kind, outcome, row, code in pool.map(_verdict, chosen):
            counts.setdefault(kind, Counter())[outcome] += 1
            if outcome == "differs":
                print(f"differs: task {row['task_id']}, {kind}\n{code}\n")
    print("\n| changed | programs | fail | pass all tests | as without the sandbox | too long to compare |")
    print("|---|---|---|---|---|---|")
    for kind, count in sorted(counts.items()):
        known = count["fails"] + count["passes"]
        total = known + count["differs"] + count["too long"]
        print(f"| {kind} | {total} | {count['fails']} | {count['passes']} | {known} | {count['too long']} |")


def _verdict(mutant: tuple[dict[str, Any], str, str]) -> tuple[str, str, dict[str, Any], str]:
    row, kind, code = mutant
    expected = naive(code, row["test_setup_code"], tests_of(row))
    grade = graded(code, tests_of(row), row["test_setup_code"], limits=BRIEF)
    if not isinstance(grade, Grade):
        return kind, "differs", row, code
    if expected is None:  # an endless loop: no verdict to compare with, and none that passes
        return kind, "differs" if all(grade.passed) else "too long", row, code
    if list(grade.passed) != expected:
        return kind, "differs", row, code
    return kind, "passes" if all(expected) else "fails", row, code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(DATA), help="MBPP's mbpp.jsonl")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mutants", type=int, default=3, help="changed copies of each reference")
    parser.add_argument("--only", choices=("rates", "verdicts"))
    chosen = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    about = (
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )
    print(f"{about}, load {os.getloadavg()[0]:.1f}")
    loaded = rows(chosen.data)
    if chosen.only != "verdicts":
        measure_rates(loaded, chosen.workers, chosen.runs)
    if chosen.only != "rates":
        measure_verdicts(loaded, chosen.mutants)
