"""Scalars and texts of runs that were recorded as lines of JSON: hundreds of thousands of rollouts in seconds.

The database's own reader of JSON is used, in a connection that is closed again before anybody asks anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from posttrain.apps.view.rollout_files import File, RolloutPart
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.runs.record.schema import START

TOGETHER = 16  # files that are read at once
MEMORY = "300MB"
_COLUMNS = {
    "id": "VARCHAR", "group": "VARCHAR", "side": "VARCHAR", "prompt": "VARCHAR", "text": "VARCHAR", "answer": "JSON",
    "reward": "DOUBLE", "invalid": "VARCHAR", "rewards": "MAP(VARCHAR, DOUBLE)", "stop": "VARCHAR",
    "version": "INTEGER", "advantage": "DOUBLE",
    "transcripts": "STRUCT(tokens INTEGER[], sampled INTEGER[][])[]",
}  # fmt: skip
_PLACE = """cast(regexp_extract(filename, 'step-(\\d+)', 1) as integer) as step,
       contains(filename, '/evals/') as held_out, coalesce(try_cast(split_part(id, '/', 2) as integer), 0) as "index\""""
_SELECT = f"""
select {_PLACE}, "group",
       row_number() over (partition by filename, "group", side order by try_cast(split_part(id, '/', 2) as integer)) - 1
           as member,
       coalesce(try_cast(regexp_extract("group", '#(\\d+)$', 1) as integer), 0) as epoch,
       regexp_replace("group", '#\\d+$', '') as task, side, reward, invalid,
       list_transform(map_entries(rewards), lambda e: {{'name': e.key, 'value': e.value}}) as parts,
       reward as used, advantage, stop,
       coalesce(stop not in ('eos', 'stop'), false) as truncated, coalesce(version, 0) as version,
       coalesce(list_sum(flatten(list_transform(transcripts, lambda t: list_transform(t.sampled, lambda s: s[2])))), 0)
           as sampled,
       sampled as length, coalesce(list_sum(list_transform(transcripts, lambda t: len(t.tokens))), 0) as total,
       left(prompt, {START}) as prompt_start, left(text, {START}) as text_start
"""


def _reader(files: list[str], columns: Mapping[str, str]) -> str:
    paths = ", ".join("'" + path.replace("'", "''") + "'" for path in files)
    kinds = ", ".join(f"'{name}': '{kind}'" for name, kind in columns.items())
    return (
        f"read_json([{paths}], format='newline_delimited', columns={{{kinds}}}, filename=true, "
        "maximum_object_size=33554432)"
    )


def scalars(files: Mapping[RolloutPart, File]) -> Iterator[tuple[list[RolloutPart], pa.Table | UserError]]:
    """Tables of some parts at a time; for a part that cannot be read, why."""
    parts = list(files)
    connection = duckdb.connect(":memory:", config={"threads": "2", "memory_limit": MEMORY})
    try:
        for begin in range(0, len(parts), TOGETHER):
            yield from _scalars_of(connection, files, parts[begin : begin + TOGETHER])
    finally:
        connection.close()


def _scalars_of(
    connection: Any, files: Mapping[RolloutPart, File], parts: list[RolloutPart]
) -> Iterator[tuple[list[RolloutPart], pa.Table | UserError]]:
    """Of all of them at once, or where that fails of each alone."""
    found: pa.Table | UserError
    try:
        paths = [str(files[part].path) for part in parts]
        found = _completed(_fetched(connection, _SELECT + " from " + _reader(paths, _COLUMNS)))
    except UserError as error:
        found = error
    if isinstance(found, UserError) and len(parts) > 1:
        for part in parts:
            yield from _scalars_of(connection, files, [part])
    else:
        yield parts, found


def _completed(table: pa.Table) -> pa.Table:
    """In order, and with the columns that nobody recorded then."""
    table = table.take(pc.sort_indices(table, [(name, "ascending") for name in ("step", "held_out", "index")]))
    count = table.num_rows
    kinds = ["eval" if held else "rl" for held in table["held_out"].to_pylist()]
    columns: dict[str, Any] = {
        "kind": pa.array(kinds, pa.string()),
        "scored": table["sampled"],
        "flags": pa.nulls(count, pa.list_(pa.string())),
        "replayed": pa.array([False] * count, pa.bool_()),
        **{name: pa.nulls(count, pa.float64()) for name in ("shaping", "penalty")},
        **{name: pa.nulls(count, pa.string()) for name in ("fate", "why", "invalid_kind")},
    }
    for name, values in columns.items():
        table = table.append_column(name, values)
    return table


def texts(files: Mapping[RolloutPart, File]) -> pa.Table:
    """Whole texts of these parts."""
    columns = {"id": "VARCHAR", "prompt": "VARCHAR", "text": "VARCHAR", "answer": "JSON"}
    select = f"""
        select {_PLACE}, prompt, text, null::varchar as notes,
               case when answer is null then null else json_object('answer', answer)::varchar end as columns
        from {_reader([str(file.path) for file in files.values()], columns)}"""
    with duckdb.connect(":memory:", config={"threads": "2", "memory_limit": MEMORY}) as connection:
        return _fetched(connection, select)


def _fetched(connection: Any, sql: str) -> pa.Table:
    try:
        return connection.sql(sql).to_arrow_table()
    except duckdb.Error as error:
        raise UserError(f"the run's rollouts cannot be read: {one_line(error)[:300]}") from None
