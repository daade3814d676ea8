"""Puts small mistakes into the modules that matter, one at a time, and says which of them no test notices.

    python tools/mutants.py --log mutants.jsonl                    the whole draw of seed 0; --resume goes on
    python tools/mutants.py --modules training/sources/rl_source.py --each 50      50 of one module
    python tools/mutants.py --log mutants.jsonl --report docs/results/mutation.md

A mistake is tried against the tests that run its line, the quickest first. `tools/mutating/operators.py` says which
mistakes there are, `tools/mutating/equivalent.py` which of them change nothing. Exit code 1 if fewer than 95 of 100 that
are not equivalent are noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutating.equivalent import reason
from mutating.operators import Mutant, digest, mutants
from mutating.report import table, write
from mutating.trial import ROOT, Copy, Outcome, Record, Server, attempt_afresh

PACKAGE = ROOT / "posttrain"
MODULES = (
    "algorithms/*.py", "training/sources/*.py", "envs/play/player.py", "envs/play/episode.py", "engines/local/sampler.py",
    "engines/request.py",
    "engines/local/running_batch.py", "engines/local/local_engine.py", "models/losses/likelihood.py",
    "models/native/linear.py",
    "learners/*.py",
    "training/loop.py", "core/batch.py", "core/types.py",
)  # fmt: skip
FILES = (  # those whose tests run in this very process; the quickest of them are tried first
    "preference", "credit", "objective", "critic", "trust_region", "packing", "sft_source", "rl_source", "play", "engine",
    "kernels", "diversity", "axes", "pages", "trainer_health", "health", "decoder", "compiled", "tree_attention",
    "checkpoint", "training_loop", "third_source", "ahead", "branching", "decoupled", "ledger", "older_weights",
    "reward_rows", "reward_training", "references", "teaching", "unseen", "divergence", "routing", "data_options",
    "enacting", "showing", "kept", "adapters", "record", "values",
)  # fmt: skip
IN_CHILDREN = {  # modules whose lines run in child processes of these files of tests as well
    "learners/data_parallel.py": ("two_processes", "processes"),
    "learners/expert_parallel_learner.py": ("expert_parallel",),
    "learners/fsdp.py": ("sharding",),
    "learners/lockstep.py": ("sharding", "expert_parallel"),
    "learners/process_group.py": ("two_processes", "sharding"),
    "models/hf/expert_parallel.py": ("expert_parallel",),
}
WIDER = {  # what survived is tried once more with all tests of these files, of the first beginning that fits
    "algorithms/preference": ("preference", "pages", "preferences_page"),
    "algorithms/": ("pages", "objective", "reward_training", "teaching"),
    "core/": ("values", "record", "ledger", "rl_source"),
    "engines/": ("engine", "kept", "serving", "compiled"),
    "envs/": ("branching", "play", "sides"),
    "learners/router": ("routing",),
    "learners/": ("two_processes", "sharding", "processes", "rl_source", "trust_region"),
    "models/": ("adapters", "lora", "kernels", "objective", "quantized"),
    "training/loop": ("training_loop", "trainer_health", "ahead"),
    "training/sources/example": ("showing", "record", "sft_source", "reward_rows", "reward_training"),
    "training/sources/demonstrations": ("showing", "sft_source", "resume"),
    "training/sources/pref": ("preference", "reward_training", "references", "showing"),
    "training/sources/re": ("references", "reward_training", "reward_rows", "teaching", "services_of_a_run"),
    "training/": ("rl_source", "ahead", "unseen", "trainer_health", "older_weights", "showing", "bad_input"),
}
LIBRARIES = (
    "torch numpy hypothesis hypothesis.strategies pyarrow safetensors.torch tokenizers jinja2 rapidfuzz cyclopts"
)


def file_of(name: str) -> str:
    """The file of tests of this name, from the root."""
    [found] = (ROOT / "tests").rglob(f"test_{name}.py")
    return str(found.relative_to(ROOT))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", default=list(MODULES), help="patterns within the package")
    parser.add_argument("--each", type=int, default=25, help="mistakes of each module")
    parser.add_argument("--total", type=int, help="so many of these, of every module in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="the mistakes of these names, as --log has them")
    parser.add_argument("--seconds", type=float, default=120, help="of tests, as they take without a mistake, for each")
    parser.add_argument(
        "--wider", nargs="*", help="survivors of --log: all tests of these files; none named: of those in WIDER"
    )
    parser.add_argument(
        "--again", nargs="+", help="survivors of --log: the tests of --files whose names hold one of these"
    )
    parser.add_argument("--files", nargs="+", default=list(FILES), help="files of tests")
    parser.add_argument("--log", type=Path, default=Path("mutants.jsonl"), help="every outcome, a line of JSON each")
    parser.add_argument("--resume", action="store_true", help="what stands in --log is not tried again")
    parser.add_argument("--report", type=Path, help="write what --log says into this document, and try nothing")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/posttrain-mutants"))
    chosen = parser.parse_args(arguments)
    drawn = draw(chosen.modules, chosen.each, chosen.seed, chosen.total)
    if chosen.report is None:
        _try(chosen, drawn)
    rows = _read(chosen.log, [m for _, own in drawn.values() for m in own])
    if chosen.report is not None:
        amount = f"--each {chosen.each}" if chosen.total is None else f"--total {chosen.total}"
        write(chosen.report, rows, drawn, f"python tools/mutants.py --seed {chosen.seed} {amount}")
    lines, share = table(rows, drawn)
    print("\n".join(lines))
    return 0 if share >= 0.95 else 1


def draw(
    patterns: Sequence[str], each: int, seed: int, total: int | None = None
) -> dict[str, tuple[int, list[Mutant]]]:
    """Module -> how many mistakes can be made in it, and those drawn: of every kind in turn, so that rare ones count."""
    found = {}
    for module in _modules(patterns):
        source = (PACKAGE / module).read_bytes()
        every = mutants(module, source)
        chance = random.Random(f"{seed} {module}")
        kinds: dict[str, list[Mutant]] = defaultdict(list)
        for mutant in chance.sample(every, len(every)):
            kinds[mutant.kind].append(mutant)
        turns = [kinds[kind] for kind in chance.sample(sorted(kinds), len(kinds))]
        row = [own[turn] for turn in range(len(every)) for own in turns if turn < len(own)]
        standing = (mutant for mutant in row if mutant.stands(source))
        if every:
            found[module] = len(every), [m for m, _ in zip(standing, range(each), strict=False)]
    if total is not None:
        order = random.Random(seed).sample(sorted(found), len(found))
        turns = [(turn, module) for turn in range(each) for module in order if turn < len(found[module][1])]
        kept = Counter(module for _, module in turns[:total])
        found = {module: (sites, own[: kept[module]]) for module, (sites, own) in found.items()}
    return found


def _modules(patterns: Sequence[str]) -> list[str]:
    """The modules that they name, from the package; a pattern without any is an error, for modules are moved."""
    found = {pattern: [str(p.relative_to(PACKAGE)) for p in PACKAGE.glob(pattern)] for pattern in patterns}
    assert all(found.values()), f"no module: {[pattern for pattern, own in found.items() if not own]}"
    return sorted({module for own in found.values() for module in own})


# -- trying ------------------------------------------------------------------------------------------------------------


def _try(chosen: argparse.Namespace, drawn: dict[str, tuple[int, list[Mutant]]]) -> None:
    every = [m for _, own in drawn.values() for m in own if not chosen.only or m.id in chosen.only]
    survivors = chosen.wider is not None or chosen.again
    known = _read(chosen.log, every) if chosen.resume or survivors or chosen.only else {}
    if survivors:
        every = [m for m in every if known.get(m.id, {}).get("status") == "survived" and not reason(m)]
    elif not chosen.only:
        every = [m for m in every if m.id not in known]
    if not (chosen.resume or survivors or chosen.only):
        chosen.log.unlink(missing_ok=True)
    log = chosen.log.resolve()
    chosen.scratch.mkdir(parents=True, exist_ok=True)
    copy = Copy.make(chosen.scratch)
    for library in LIBRARIES.split():
        importlib.import_module(library)
    if chosen.wider is not None:
        for mutant in every:
            with copy.changed(mutant.module, mutant.applied((PACKAGE / mutant.module).read_bytes())):
                files = list(map(file_of, chosen.wider or _beside(mutant.module)))
                _note(log, mutant, attempt_afresh(copy, files, 1800, chosen.scratch / "afresh.txt"))
        return
    server = Server(copy, list(map(file_of, chosen.files)), chosen.scratch / "collected.txt")
    assert server.tests, f"nothing was collected: see {chosen.scratch}/collected.txt"
    if chosen.again:
        some = [name for name in server.tests if any(part in name for part in chosen.again)]
        records = {name: Record(1.0, {m: [] for m in drawn}) for name in some}
    else:
        records = _records(server, copy, chosen.scratch / "records")
    began = time.monotonic()
    for count, mutant in enumerate(every, 1):
        found = _attempt(mutant, copy, server, records, chosen)
        _note(log, mutant, found)
        place = f"{mutant.module}:{mutant.line} {mutant.kind}: {mutant.before!r} -> {mutant.after!r}"
        spent = time.monotonic() - began
        print(f"{count}/{len(every)} {spent:.0f}s {found.status} {found.seconds:.1f}s {place} {found.by}", flush=True)
    server.close()


def _beside(module: str) -> Sequence[str]:
    return next(files for beginning, files in WIDER.items() if module.startswith(beginning))


def _attempt(
    mutant: Mutant, copy: Copy, server: Server, records: dict[str, Record], chosen: argparse.Namespace
) -> Outcome:
    tests = list(records) if chosen.again else proving(mutant, records, chosen.seconds)
    seconds = 15 + 2 * sum(records[name].seconds for name in tests)
    with copy.changed(mutant.module, mutant.applied((PACKAGE / mutant.module).read_bytes())) as file:
        found = Outcome("survived", "no test runs this line")
        if tests and mutant.within is not None:
            found = server.attempt(file, tests, seconds)
        if tests and found.status in ("unchanged", "survived"):
            # Values computed at collection have not changed: survivors are tried in a fresh process as well.
            found = attempt_afresh(copy, tests, seconds, chosen.scratch / "afresh.txt")
        if found.status == "survived" and (files := unrecorded(mutant)):
            found = attempt_afresh(copy, list(map(file_of, files)), 600, chosen.scratch / "afresh.txt")
        return found


def unrecorded(mutant: Mutant) -> list[str]:
    """Files of tests that may notice it without a record that says so: it runs at import, or in their child processes."""
    at_import = ("pages", *_beside(mutant.module)) if mutant.within is None else ()
    return list(dict.fromkeys((*at_import, *IN_CHILDREN.get(mutant.module, ()))))


def proving(mutant: Mutant, records: dict[str, Record], seconds: float) -> list[str]:
    """The tests that run a mutant's line (one at module level: the module), so many that they take no longer than that.

    First the quickest variant of each, the quickest of these before others; then the other variants.
    """
    first, last = mutant.lines
    ran = {}
    for name, record in records.items():
        lines = record.lines.get(mutant.module, ())
        if any(first <= line <= last for line in lines) if mutant.within else lines:
            ran[name] = record.seconds
    variants: dict[str, int] = defaultdict(int)
    rank = {}
    for name in sorted(ran, key=lambda name: ran[name]):
        plain = name.partition("[")[0]
        rank[name] = min(variants[plain], 1), ran[name]
        variants[plain] += 1
    found, used = [], 0.0
    for name in sorted(rank, key=lambda name: rank[name]):
        if used + ran[name] <= seconds:
            found.append(name)
            used += ran[name]
    return found


def _records(server: Server, copy: Copy, folder: Path) -> dict[str, Record]:
    """What every test runs: recorded once for each file of tests, as long as neither it nor the package changes."""
    folder.mkdir(exist_ok=True)
    package = hashlib.blake2b(digest_size=8)
    for file in sorted((copy.tree / "posttrain").rglob("*.py")):
        package.update(file.read_bytes())
    found: dict[str, Record] = {}
    for file in dict.fromkeys(name.partition("::")[0] for name in server.tests):
        own = hashlib.blake2b((copy.tree / file).read_bytes() + package.digest(), digest_size=8).hexdigest()
        stored = folder / f"{Path(file).stem}-{own}.json"
        if not stored.exists():
            began = time.monotonic()
            fields = {name: asdict(record) for name, record in server.record(file).items()}
            stored.write_text(json.dumps(fields))
            print(f"recorded {file}: {len(fields)} tests, {time.monotonic() - began:.0f} s", flush=True)
        found |= {name: Record(**fields) for name, fields in json.loads(stored.read_text()).items()}
    return found


def _note(log: Path, mutant: Mutant, outcome: Outcome) -> None:
    source = digest((PACKAGE / mutant.module).read_bytes())
    with log.open("a") as file:
        file.write(json.dumps({"id": mutant.id, "source": source, **asdict(mutant), **asdict(outcome)}) + "\n")


def _read(log: Path, drawn: Sequence[Mutant]) -> dict[str, dict[str, Any]]:
    """The last outcome of each that was drawn, from the module as it stands now."""
    names = {mutant.id: mutant for mutant in drawn}
    digests = {module: digest((PACKAGE / module).read_bytes()) for module in {x.module for x in drawn}}
    found = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        row = json.loads(line)
        if row["id"] in names and row["source"] == digests[row["module"]]:
            found[row["id"]] = {**row, "reason": reason(names[row["id"]])}
    return found


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
