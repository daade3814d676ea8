"""A SQL view with a row for each token of some rollouts. Lists are expanded only where a query needs them.

The lists of a rollout hold values of its sampled or its scored tokens only; the view joins each value with its token. A
condition on `step` selects the files, so that a query reads only the steps that it names.

S      spans of a rollout, in order; together they cover all of its tokens
"""

from __future__ import annotations

from posttrain.runs.record.schema import NUMBERS

COLUMNS = (
    "step", "held_out", "index", "group", "member", "task", "reward", "fate", "place", "token", "text", "origin", "learned",
    "version", "engine", *(name for name in NUMBERS if name != "token_advantage"), "advantage", "kept", "ratio",
)  # fmt: skip
"""The columns of the view. `text` is null without a vocabulary."""

_LISTS = (*NUMBERS, "kept")
_LATER = (
    "coalesce(starts_with(why, 'in update') and not starts_with(why, 'in update 1 of'), false)"
    # trained by an update other than the first of its step
)


def tokens_of(rollouts: str, vocabulary: str | None = None, sampler: bool = False) -> str:
    """Return the SELECT. `rollouts`: a table of rollouts with `held_out`; `vocabulary`: a table of ids and texts;
    `sampler`: whether the ratio divides by the sampler's probabilities.
    """
    old = "engine" if sampler else f"coalesce(before, if({_LATER}, engine, learner))"
    lists = ", ".join(f"unnest({_at_scored(name)}) as {name}" for name in _LISTS)
    numbers = ", ".join(name for name in NUMBERS if name not in ("token_advantage", "before"))
    text, words = ("v.text", f" left join {vocabulary} v on v.id = laid.token") if vocabulary else ("null::varchar", "")
    return f"""
        with marked as (select *, list_transform(spans, lambda s: {{
                 'kind': s.kind, 'learned': s.learned, 'version': s.version, 'length': s.length,
                 'scored': {_before("p.learned")}, 'sampled': {_before("p.kind = 'sampled'")}}}) as marks
             from {rollouts}),
             laid as (select step, held_out, "index", "group", member, task, reward, fate, advantage as own, why,
                 unnest(generate_series(0, len(tokens) - 1))::int as place, unnest(tokens) as token,
                 unnest({_each("m.kind")}) as origin, unnest({_each("m.learned")}) as learned,
                 unnest({_each("m.version")}) as version, unnest({_AT_SAMPLED}) as engine, {lists}
             from marked)
        select step, held_out, "index", "group", member, task, reward, fate, place, token, {text} as text, origin, learned,
               version, engine, coalesce(before, if({_LATER}, null, learner)) as before, {numbers},
               if(learned, coalesce(token_advantage, own), null) as advantage, kept,
               exp(learner - {old}) as ratio
        from laid{words}"""


def _before(condition: str) -> str:
    """Return the SQL expression for the tokens of spans p before span s that satisfy a condition."""
    earlier = f"list_filter(spans, lambda p: p.start < s.start and {condition})"
    return f"coalesce(list_sum(list_transform({earlier}, lambda p: p.length)), 0)"


def _each(value: str) -> str:
    """[tokens]: SQL for a span's value at each of its tokens."""
    return f"flatten(list_transform(marks, lambda m: list_resize([{value}], m.length, {value})))"


def _placed(name: str, condition: str, earlier: str) -> str:
    """[tokens]: SQL for a list with values at some spans only, null elsewhere."""
    own = f"list_slice({name}, m.{earlier} + 1, m.{earlier} + m.length)"
    return f"flatten(list_transform(marks, lambda m: list_resize(if({condition}, {own}, []), m.length)))"


def _at_scored(name: str) -> str:
    return _placed(name, "m.learned", "scored")


_AT_SAMPLED = _placed("engine", "m.kind = 'sampled'", "sampled")
