"""What the start of `view` takes short cuts with: each gives what the long way gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import generated_runs
import numpy as np
import pyarrow as pa
import pytest

from posttrain.apps.view.column_table import RolloutColumns, merged
from posttrain.apps.view.rollout_files import RolloutPart, _belongs

SERVED = """
import sys
from importlib.util import find_spec
from posttrain.apps.view.view_command import _lighter, opened
before = list(sys.meta_path)
with _lighter():
    [run] = opened(sys.argv[1:])
    run.read()
    run.store.read_texts()
    sizes = {part: 100 for part in run.store.files}
    assert len(run.store.meant(run.store.rows, "reward > 0.4 and text like '%a%'")) > 0
    assert len(run.store.marked(run.store.rows, "entropy > 1 and text = text", sizes).rows) > 0
    assert "pandas" not in sys.modules and find_spec("pandas") is not None
assert sys.meta_path == before
"""


def test_numbers_go_to_and_from_arrays_and_databases_without_pandas(tmp_path: Path) -> None:
    run = generated_runs.make_run(tmp_path / "run", steps=2, groups=2, group=2, tokens=8, evals=0)
    subprocess.run([sys.executable, "-c", SERVED, str(run)], check=True)


def table(keys: list[tuple[int, bool, int]], groups: list[str] | None = None) -> pa.Table:
    steps, held, indices = zip(*keys, strict=True)
    columns = {
        "step": pa.array(steps, pa.int32()),
        "held_out": pa.array(held, pa.bool_()),
        "index": pa.array(indices, pa.int32()),
        "reward": pa.array(np.zeros(len(keys))),
    }
    texts = {"group": groups or ["g"] * len(keys), "side": [None] * len(keys)}
    return pa.table(columns | {n: pa.array(v, pa.string()).dictionary_encode() for n, v in texts.items()})


IN_ORDER = [(step, held, index) for step in (3, 4) for held in (False, True) for index in range(4)]
PARTS = [RolloutPart(step, held) for step in (3, 4) for held in (False, True)]


@pytest.mark.parametrize("seed", range(20))
def test_rows_belong_to_a_piece_once_each_in_whatever_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(IN_ORDER)) if seed else np.arange(len(IN_ORDER))
    rows = [IN_ORDER[i] for i in order]
    assert _belongs(table(rows), PARTS) and not _belongs(table(rows), PARTS[1:])
    again = rng.integers(len(rows))
    assert not _belongs(table([*rows[:again], rows[again], *rows[again:]]), PARTS), "one row stands there twice"
    assert not _belongs(table([*rows, *rows[:4]]), PARTS), "and a whole part"


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_numbered_by_their_first_rows_wherever_the_others_stand(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [f"task {n}" for n in np.sort(rng.integers(0, 3, len(IN_ORDER)))]
    groups = groups if seed % 2 else [str(name) for name in rng.permutation(groups)]
    rows = RolloutColumns(merged([table(IN_ORDER, groups)]))
    known: dict[tuple[int, bool, str], int] = {}
    expected = [known.setdefault((s, h, g), len(known)) for (s, h, _), g in zip(IN_ORDER, groups, strict=True)]
    assert rows.gid.tolist() == expected and rows.gid.dtype == np.int32
