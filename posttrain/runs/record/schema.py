"""The table of rollouts: its columns, their types, and the version of both.

A row is one rollout, or one response of a preference example. Lists hold tokens: `tokens` and `spans` count all of
them, with the transcripts end to end; the columns of `NUMBERS` have a value for each scored token, in order; `engine`
one for each sampled token.

Values that follow from other columns are not stored: the ratio is exp(learner - before), 1 where there is no `before`
because the step's first update alone learned from the rollout, and exp(learner - engine) in rows whose `old` is
"sampler"; on which side it is clipped follows from the algorithm's bounds, which are in run.json.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

VERSION = "2"
KEY = b"posttrain.schema"
"""The key of the version in a file's metadata."""

NUMBERS = (
    "before",  # log-probability under the learner, before the step's first update; null where that is its own
    "learner",  # at the token's update; of several, at the last
    "reference",  # under the reference
    "entropy",  # nats, at the token's update
    # -d loss / d log-probability (or share of its divergence), summed over the step's updates: see core/token_probe.py
    "weight",
    "token_advantage",  # where it is not the same for all tokens
    "value",  # of the critic
    "returns",  # the critic's targets
    "teacher",  # log-probability under the teacher
    "after",  # under the step's final weights
)
"""float32, one for each scored token, rounded to eleven bits; null where it was not recorded."""
COMPARED = ("before", "learner", "after")
"""Columns that are not rounded in rollouts that have `after`: the change of a step may be less than eleven bits can show."""

_TEXT = pa.string()
_CALL = pa.struct([("tool", _TEXT), ("arguments", _TEXT), ("end", pa.int32()), ("problem", _TEXT)])
_TURN = pa.struct(
    [
        ("role", _TEXT),  # prompt | sampled | observation | tool: see SpanKind
        ("text", _TEXT),  # null where it is all of the row's `prompt` (role prompt) or `text` (role sampled)
        ("transcript", pa.int32()),
        ("first", pa.int32()),  # place of its first token in that transcript
        ("length", pa.int32()),
        ("reward", pa.float64()),
        ("cut", pa.int32()),  # tokens that did not fit and were left out
        ("calls", pa.list_(_CALL)),  # `arguments` as JSON
    ]
)
_SPAN = pa.struct(
    [
        ("kind", _TEXT),
        ("start", pa.int32()),  # counted in `tokens`
        ("length", pa.int32()),
        ("version", pa.int32()),  # of the weights that sampled it
        ("learned", pa.bool_()),  # whether its tokens are scored
    ]
)
_PICTURE = pa.struct([("name", _TEXT), ("start", pa.int32()), ("length", pa.int32()), ("grid", pa.list_(pa.int32()))])

SCALARS = pa.schema(
    [
        ("step", pa.int32()),
        ("index", pa.int32()),  # of the row in its file
        ("kind", _TEXT),  # the verb, or eval
        ("group", _TEXT),
        ("member", pa.int32()),  # which of its group, or which response of its preference example
        ("epoch", pa.int32()),  # visits to the task before this one
        ("task", _TEXT),  # its id
        ("columns", _TEXT),  # JSON of the task's own columns, pictures by their names
        ("side", _TEXT),
        ("prompt", _TEXT),
        ("asked", _TEXT),  # of a prompt of messages, the beginning of its user's last message; null of text
        ("text", _TEXT),
        ("reward", pa.float64()),  # null: invalid
        ("invalid", _TEXT),  # why
        ("invalid_kind", _TEXT),
        ("parts", pa.list_(pa.struct([("name", _TEXT), ("value", pa.float64())]))),
        ("step_rewards", pa.list_(pa.struct([("at", pa.int32()), ("reward", pa.float64())]))),
        ("shaping", pa.float64()),
        ("penalty", pa.float64()),
        ("used", pa.float64()),  # reward + shaping - penalty
        ("advantage", pa.float64()),  # mean over its scored tokens
        ("fate", _TEXT),
        ("why", _TEXT),
        ("flags", pa.list_(_TEXT)),
        ("replayed", pa.bool_()),
        ("stop", _TEXT),
        ("truncated", pa.bool_()),
        ("version", pa.int32()),  # of the oldest weights that sampled any of it
        ("versions", pa.list_(pa.int32())),
        ("sampled", pa.int32()),  # tokens
        ("scored", pa.int32()),
        ("length", pa.int32()),  # of the reply: sampled tokens, or of a given row learned ones
        ("total", pa.int32()),  # all tokens
        ("notes", _TEXT),  # JSON of the environment's notes
        ("answers", _TEXT),  # JSON of services' answers, and `said`, their reasons
        ("media", pa.list_(_TEXT)),  # names of pictures
        ("branch_of", pa.int32()),
        ("branch_turns", pa.int32()),
        ("branch_taken", pa.list_(pa.int32())),  # sampled tokens of each transcript that are the other's
        ("label", _TEXT),  # JSON of a response's labels
        ("turns", pa.list_(_TURN)),
    ]
)
TOKENS = pa.schema(
    [
        ("tokens", pa.list_(pa.int32())),
        ("transcripts", pa.list_(pa.int32())),  # length of each
        ("spans", pa.list_(_SPAN)),
        ("pictures", pa.list_(_PICTURE)),  # `start` counted in `tokens`
        ("forks", pa.list_(pa.list_(pa.int32()))),  # of each transcript; null where none has any
        ("engine", pa.list_(pa.float32())),  # log-probability of each sampled token
    ]
)
ROLLOUTS = pa.schema(
    [*SCALARS, *TOKENS, *((name, pa.list_(pa.float32())) for name in NUMBERS), ("kept", pa.list_(pa.bool_()))],
    metadata={KEY: VERSION.encode()},
)
"""All columns of rollouts/step-000012.parquet and evals/step-000020.parquet."""

UNINDEXED = ("prompt", "asked", "text", "columns", "notes", "answers", "label", "turns")
INDEX = pa.schema(
    [
        *(field for field in SCALARS if field.name not in UNINDEXED),
        ("prompt_start", _TEXT),  # the first characters, of a prompt of messages those of `asked`
        ("text_start", _TEXT),  # its first characters
        ("held_out", pa.bool_()),  # whether the row is in evals/
    ],
    metadata={KEY: VERSION.encode()},
)
"""A piece of index/: scalars of 50 steps, without long columns."""
PIECE, START, ASKED = 50, 80, 400
"""Steps of a piece of the index; characters of a text in it, and of `asked`, where the name of a picture
takes nearly as many."""

SECONDS = pa.schema(
    [("index", pa.int32()), ("reward", pa.float64()), ("turns", pa.list_(pa.float64()))],
    metadata={KEY: VERSION.encode()},
)
"""seconds/step-000012.parquet: what depends on the clock."""


def columns(names: Iterable[str]) -> pa.Schema:
    """Return some of the columns of rollouts, in their order."""
    wanted = set(names)
    assert wanted <= set(ROLLOUTS.names), f"no columns: {sorted(wanted - set(ROLLOUTS.names))}"
    return pa.schema([field for field in ROLLOUTS if field.name in wanted], metadata=ROLLOUTS.metadata)
