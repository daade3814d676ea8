"""The table of rollouts: its columns, their types, and the version of both.

A row is one rollout, or one response of a preference example. Lists hold values per token: `tokens` and `spans` cover
all tokens of the concatenated transcripts; the columns of `NUMBERS` have a value for each scored token, in order;
`engine` has one for each sampled token.

Values that follow from other columns are not stored: the ratio is exp(learner - before), 1 if there is no `before`
because only the step's first update trained on the rollout, and exp(learner - engine) in rows whose `old` is "sampler";
the side on which it is clipped follows from the algorithm's bounds, which are in run.json.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

VERSION = "3"
KEY = b"posttrain.schema"
"""Key of the version in a file's metadata."""

NUMBERS = (
    "before",  # log-probability under the learner before the step's first update; null if its only update was that one
    "learner",  # log-probability at the token's update, the last of several
    "reference",  # log-probability under the reference
    "entropy",  # nats, at the token's update
    # -d loss / d log-probability (or share of its divergence), summed over the step's updates: see core/token_probe.py
    "weight",
    "token_advantage",  # only if tokens have different ones
    "value",  # the critic's value
    "returns",  # the critic's targets
    "teacher",  # log-probability under the teacher
    "after",  # log-probability under the step's final weights
)
"""float32, one per scored token, rounded to eleven bits; null if not recorded."""
COMPARED = ("before", "learner", "after")
"""Columns that are not rounded if the rollout has `after`: eleven bits may not show the change of a step."""

_TEXT = pa.string()
_CALL = pa.struct([("tool", _TEXT), ("arguments", _TEXT), ("end", pa.int32()), ("problem", _TEXT)])
_TURN = pa.struct(
    [
        ("role", _TEXT),  # prompt | sampled | observation | tool: see SpanKind
        ("text", _TEXT),  # null if it equals the row's `prompt` (role prompt) or `text` (role sampled)
        ("transcript", pa.int32()),
        ("first", pa.int32()),  # index of its first token in that transcript
        ("length", pa.int32()),
        ("reward", pa.float64()),
        ("cut", pa.int32()),  # tokens that did not fit the context and were left out
        ("calls", pa.list_(_CALL)),  # `arguments` is JSON
        ("temperature", pa.float64()),  # of a reply's sampling; null: the run's
    ]
)
_SPAN = pa.struct(
    [
        ("kind", _TEXT),
        ("start", pa.int32()),  # index in `tokens`
        ("length", pa.int32()),
        ("version", pa.int32()),  # version of the weights that sampled it
        ("learned", pa.bool_()),  # whether its tokens are scored
        ("temperature", pa.float64()),  # at which it was sampled; null: the run's
    ]
)
_PICTURE = pa.struct([("name", _TEXT), ("start", pa.int32()), ("length", pa.int32()), ("grid", pa.list_(pa.int32()))])

SCALARS = pa.schema(
    [
        ("step", pa.int32()),
        ("index", pa.int32()),  # index of the row in its file
        ("kind", _TEXT),  # name of the verb, or eval
        ("group", _TEXT),
        ("member", pa.int32()),  # index in its group, or of the response in its preference example
        ("epoch", pa.int32()),  # number of earlier visits to the task
        ("task", _TEXT),  # id of the task
        ("columns", _TEXT),  # JSON of the task's columns, with names of pictures
        ("side", _TEXT),
        ("prompt", _TEXT),
        ("asked", _TEXT),  # beginning of the last user message of a prompt of messages; null for text
        ("text", _TEXT),
        ("reward", pa.float64()),  # null: invalid
        ("invalid", _TEXT),  # reason
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
        ("version", pa.int32()),  # version of the oldest weights that sampled any of its tokens
        ("versions", pa.list_(pa.int32())),
        ("sampled", pa.int32()),  # number of sampled tokens
        ("scored", pa.int32()),
        ("length", pa.int32()),  # tokens of the reply: sampled ones, or trained ones of a given row
        ("total", pa.int32()),  # number of all tokens
        ("notes", _TEXT),  # JSON of the environment's notes
        ("answers", _TEXT),  # JSON of services' answers; `said`: their reasons
        ("media", pa.list_(_TEXT)),  # names of pictures
        ("branch_of", pa.int32()),
        ("branch_turns", pa.int32()),
        ("branch_taken", pa.list_(pa.int32())),  # per transcript: sampled tokens of the other rollout
        ("label", _TEXT),  # JSON of a response's labels
        ("turns", pa.list_(_TURN)),
    ]
)
TOKENS = pa.schema(
    [
        ("tokens", pa.list_(pa.int32())),
        ("transcripts", pa.list_(pa.int32())),  # length of each transcript
        ("spans", pa.list_(_SPAN)),
        ("pictures", pa.list_(_PICTURE)),  # `start`: index in `tokens`
        ("forks", pa.list_(pa.list_(pa.int32()))),  # per transcript; null if none has any
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
        ("prompt_start", _TEXT),  # beginning of the prompt; of `asked`, for messages
        ("text_start", _TEXT),  # beginning of the text
        ("held_out", pa.bool_()),  # whether the row is from evals/
    ],
    metadata={KEY: VERSION.encode()},
)
"""A file of index/: scalars of 50 steps, without long columns."""
PIECE, START, ASKED = 50, 80, 400
"""Steps of a file of the index; characters of a text in it; characters of `asked`, of which the name of a picture takes
nearly as many.
"""

SECONDS = pa.schema(
    [("index", pa.int32()), ("reward", pa.float64()), ("turns", pa.list_(pa.float64()))],
    metadata={KEY: VERSION.encode()},
)
"""seconds/step-000012.parquet: values that depend on the clock."""


def columns(names: Iterable[str]) -> pa.Schema:
    """Return some columns of rollouts, in the order of the table."""
    wanted = set(names)
    assert wanted <= set(ROLLOUTS.names), f"no columns: {sorted(wanted - set(ROLLOUTS.names))}"
    return pa.schema([field for field in ROLLOUTS if field.name in wanted], metadata=ROLLOUTS.metadata)
