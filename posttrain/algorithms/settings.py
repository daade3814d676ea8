"""Reaches every setting of every part of a row by its place: "surrogate.high", "kl.control.target".

Places follow the fields of the row and of its parts; within several parts of one field, a part is named by its class
("shaping.soft-overlong.cache"). Flags such as "clip_high" are declared beside their setting and stand for all places that
have it, whichever a row has.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from posttrain.algorithms.row import Row
from posttrain.core.coerce import convert, fits, type_in_words
from posttrain.core.component import NEVER, Component, Setting, SettingRange, setting_of
from posttrain.core.messages import near, short
from posttrain.core.types import UserError
from posttrain.system.user_code import load_named

Place = tuple[str, ...]
AnyRow = TypeVar("AnyRow", bound=Row)

LABELS = ("name", "paper", "stated", "idea")
"""Fields of a row that are not settings."""


@dataclass(frozen=True)
class Flag:
    """The short name of a setting, and where it may stand."""

    name: str  # with underscores
    help: str
    type: Any  # what it takes: of all places together
    places: tuple[tuple[Place, type[Component]], ...]  # of the setting, and the part that has it there
    first_hour: bool = False  # whether --help shows it, and not only --help-all


def choose(row: AnyRow, settings: Mapping[str, Any]) -> AnyRow:
    """The row with the whole parts that are chosen among these settings; the others are ignored. Raises as `change`."""
    return change(row, {name: value for name, value in settings.items() if _rank(type(row), name) == 0})


def change(row: AnyRow, settings: Mapping[str, Any]) -> AnyRow:
    """The row with these settings: names of flags or places -> values, as text or of their type.

    Whole parts are chosen first, then made or removed, then changed, so the order of settings does not matter.

    Raises UserError, in one line, for a name that does not exist, a value that does not fit, a flag whose setting no
    part of the row has, and one setting with two values.
    """
    kind = type(row)
    _refuse_two_values(kind, settings)
    for name in sorted(settings, key=lambda name: _rank(kind, name)):
        flag = flags(kind).get(name.replace("-", "_"))
        if flag is None:
            row = _assigned(row, name.split("."), settings[name], name, name)
            continue
        told = f"--{flag.name.replace('_', '-')}"
        there = [place for place, owner in flag.places if _stands(row, place, owner)]
        there = there or [place for place, owner in flag.places if _knob_at(place, owner).creates][:1]
        if not there:
            raise UserError(f"{told} cannot go with {row.name}: {_hint(kind, flag)}")
        for place in there:
            row = _assigned(row, place, settings[name], told, ".".join(place))
    return row


def _refuse_two_values(kind: type[Row], settings: Mapping[str, Any]) -> None:
    """Raise UserError where a setting is given by its flag and by its place, with different values."""
    by_name = {name.replace("-", "_"): name for name in settings}
    for plain, name in by_name.items():
        flag = flags(kind).get(plain)
        for place, _ in flag.places if flag else ():
            other = by_name.get(".".join(place).replace("-", "_"))
            if other not in (None, name) and str(settings[other]) != str(settings[name]):
                told = f"--{plain.replace('_', '-')} {settings[name]} and --set {other}={settings[other]}"
                raise UserError(f"{told} are the same setting: leave one of them out")


def flags(kind: type[Row]) -> dict[str, Flag]:
    """All flags of a kind of rows, by name."""
    if kind not in _flags:
        found: dict[str, list[tuple[Place, type[Component], Any, Setting]]] = {}
        for place, owner, hint, knob in _knobs(kind, ()):
            if knob.flag:
                found.setdefault(knob.flag.replace("-", "_"), []).append((place, owner, hint, knob))
        _flags[kind] = {
            name: Flag(
                name,
                every[0][3].help,
                _together(every),
                tuple((place, owner) for place, owner, _, _ in every),
                any(known.first_hour for *_, known in every),
            )
            for name, every in found.items()
        }
    return _flags[kind]


_flags: dict[type[Row], dict[str, Flag]] = {}


def settings_of(row: Row) -> dict[str, Any]:
    """Every setting that a row has: place -> value; of a whole part that can be chosen, its name."""
    return dict(_values(row, ()))


def check_parts(row: Row) -> None:
    """Raise UserError where a row of a user's own holds something else than the parts that it is made of."""
    for f in dataclasses.fields(row):
        value, hint = getattr(row, f.name), _hints(type(row))[f.name]
        kind, several = _part_in(hint)
        if kind is not None and not fits(value, hint):
            wanted = f"a tuple of parts of kind {kind.__name__}" if several else f"a part of kind {kind.__name__}"
            raise UserError(f"{row.name}: {f.name} must be {wanted}, not {short(value)}")
    for place, part, name in _settings_at(row, ()):
        value, hint = getattr(part, name), _hints(type(part))[name]
        if not fits(value, hint):
            raise UserError(f"{row.name}: {place} must be {type_in_words(hint)}, not {short(value)}")


def check_ranges(row: Row) -> None:
    """Raise UserError for a setting outside its range: a row of a user's own may be made with any value."""
    for place, part, name in _settings_at(row, ()):
        known = setting_of(_fields(type(part))[name])
        if known.bounds != SettingRange():
            known.bounds.check(f"{row.name}: {place}", getattr(part, name))


def _settings_at(part: Any, above: Place) -> Iterator[tuple[str, Any, str]]:
    """(place, the part that has it, its name) of every plain setting."""
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        several = isinstance(value, tuple)
        inside = [own for own in (value if several else (value,)) if isinstance(own, Component)]
        for own in inside:
            yield from _settings_at(own, (*above, f.name, _named(type(own))) if several else (*above, f.name))
        if not inside:
            yield ".".join((*above, f.name)), part, f.name


def _values(part: Any, above: Place) -> Iterator[tuple[str, Any]]:
    for f in dataclasses.fields(part):
        if isinstance(part, Row) and f.name in LABELS:
            continue
        value, choices = getattr(part, f.name), setting_of(f).choices
        place = (*above, f.name)
        if choices is not None:
            names = [name for name, choice in choices.items() if _alike(choice, value)]
            yield ".".join(place), names[0] if names else repr(value)
        elif not isinstance(value, (Component, tuple)) and _part_in(_hints(type(part))[f.name])[0] is None:
            yield ".".join(place), value
        for own in value if isinstance(value, tuple) else (value,):
            if isinstance(own, Component):
                yield from _values(own, (*place, _named(type(own))) if isinstance(value, tuple) else place)


def _alike(one: Any, other: Any) -> bool:
    """Whether two choices are of the same kind, whatever their settings."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return [type(x) for x in one] == [type(x) for x in other] and (not one or one == other or len(one) > 1)
    return type(one) is type(other)


# -- what there is -----------------------------------------------------------------------------------------------------


def _knobs(kind: type[Any], above: Place) -> Iterator[tuple[Place, type[Any], Any, Setting]]:
    """(place, the class that has it, its type, what is told of it) of each setting of a class and of the parts in it."""
    hints = _hints(kind)
    for f in dataclasses.fields(kind):
        knob, hint = setting_of(f), hints[f.name]
        part, several = _part_in(hint)
        if part is None or knob.choices is not None:
            yield (*above, f.name), kind, hint, knob
        for own in _family(part) if part is not None else ():
            yield from _knobs(own, (*above, f.name, _named(own)) if several else (*above, f.name))


def _fields(kind: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}


def _hints(kind: type[Any]) -> dict[str, Any]:
    if kind not in _evaluated:
        fields = _fields(kind)
        _evaluated[kind] = {name: hint for name, hint in get_type_hints(kind).items() if name in fields}
    return _evaluated[kind]


_evaluated: dict[type[Any], dict[str, Any]] = {}  # hints are text until they are evaluated, which takes its time


def _part_in(hint: Any) -> tuple[type[Component] | None, bool]:
    """The class of parts that a field holds, if it holds any, and whether it holds several."""
    if get_origin(hint) is tuple:
        return _part_in(get_args(hint)[0])[0], True
    if get_origin(hint) in (Union, types.UnionType):
        return next((found for found in map(_part_in, get_args(hint)) if found[0]), (None, False))
    return (hint, False) if isinstance(hint, type) and issubclass(hint, Component) else (None, False)


def _family(kind: type[Component]) -> list[type[Component]]:
    """The class and all that is made of it, as far as these are parts to be used."""
    below = [x for child in kind.__subclasses__() for x in _family(child)]
    return ([kind] if dataclasses.is_dataclass(kind) else []) + below


def _named(kind: type) -> str:
    """SoftOverlong -> soft-overlong."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower()


def _together(every: Sequence[tuple[Place, type[Component], Any, Setting]]) -> Any:
    """One type for a flag that several parts have: they agree, or each takes some of the same words."""
    if choices := every[0][3].choices:
        words = tuple(choices)
        return bool if set(words) == {"true", "false"} else Literal[words]
    words = tuple(dict.fromkeys(word for _, _, hint, _ in every for word in _words(hint)))
    if words:
        absent = every[0][3].absent
        return Literal[(*words, absent) if isinstance(absent, str) else words]
    return next(x for x in get_args(every[0][2]) or (every[0][2],) if x is not type(None))


def _words(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


# -- where a name leads ------------------------------------------------------------------------------------------------


def _rank(kind: type[Row], name: str) -> int:
    """0: chooses a whole part; 1: may make or remove one; 2: changes one."""
    flag = flags(kind).get(name.replace("-", "_"))
    place = flag.places[0][0] if flag else tuple(name.split("."))
    known = next((knob for where, _, _, knob in _knobs(kind, ()) if where == place), Setting())
    if known.choices is not None:
        return 0 if len(place) == 1 else 1
    return 1 if known.creates else 2


def _knob_at(place: Place, owner: type[Component]) -> Setting:
    return setting_of(_fields(owner)[place[-1]])


def _stands(row: Row, place: Place, owner: type[Component]) -> bool:
    """Whether the row has a part of this class at the place of this setting."""
    found: Any = row
    for name in place[:-1]:
        if isinstance(found, tuple):
            found = next((part for part in found if _named(type(part)) == name), None)
        else:
            found = getattr(found, name)
    return isinstance(found, owner)


def _hint(kind: type[Row], flag: Flag) -> str:
    """Which choice brings a part that has the setting."""
    brings = []
    for other in flags(kind).values():
        known = _knob_at(*other.places[0])
        for word, part in (known.choices or {}).items():
            if any(isinstance(part, owner) for _, owner in flag.places):
                brings.append(f"--{other.name.replace('_', '-')} {word}")
    if brings:
        return f"none of its parts has that setting; a part that has it comes with {' or '.join(brings)}"
    makers = [
        f"--{other.name.replace('_', '-')}"
        for other in flags(kind).values()
        for place, owner in other.places
        if any(owner is own for _, own in flag.places) and _knob_at(place, owner).creates
    ]
    fields = _fields(kind)
    brought = [setting_of(fields[place[0]]).brought for place, _ in flag.places if setting_of(fields[place[0]]).brought]
    how = " or ".join(dict.fromkeys(makers or brought))
    return f"there is no such part to change; {how} brings one" if how else "none of its parts has that setting"


def _assigned(part: Any, place: Sequence[str], value: Any, told: str, whole: str) -> Any:
    """The part (or row) with one setting changed. told: the name that the user wrote; whole: the place from the row on."""
    hints = _hints(type(part))
    name = place[0].replace("-", "_")
    if name not in hints or name in LABELS:
        raise UserError(_unknown(type(part), told, place, whole, [h for h in hints if h not in LABELS]))
    current, hint, known = getattr(part, name), hints[name], setting_of(_fields(type(part))[name])
    kind, several = _part_in(hint)
    if len(place) > 1:
        assert kind is None or isinstance(kind, type)
        if kind is None:
            raise UserError(
                f"{told}: {'.'.join(whole.split('.')[: -len(place) + 1])} is a single value and has no settings"
            )
        new = (_in_several if several else _in_one)(current, kind, place[1:], value, told, whole)
    elif kind is not None:
        new = _chosen(value, kind, several, hint, known, told)
    else:
        new = _read(value, hint, known, told)
    return replace(part, **{name: new})


def _read(value: Any, hint: Any, known: Setting, told: str) -> Any:
    """A plain setting."""
    new = convert(value, hint, told)
    if known.off is not NEVER and new == known.off:
        return None
    known.bounds.check(told, new)
    return new


def _is_absent(value: Any, known: Setting, hint: Any) -> bool:
    """Whether this value says that the part is not there at all."""
    if known.absent is NEVER:
        return False
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        return type(None) not in get_args(hint)  # None is no value of the setting itself
    if isinstance(known.absent, str):
        return bool(value == known.absent)
    try:
        return bool(float(value) == known.absent)
    except (TypeError, ValueError):
        return False


def _in_one(current: Any, kind: type[Component], place: Sequence[str], value: Any, told: str, whole: str) -> Any:
    """A setting of the one part that a field holds, or may hold."""
    owner = kind if current is None else type(current)
    name = place[0].replace("-", "_")
    fields = _fields(owner)
    if len(place) == 1 and name in fields:
        known = setting_of(fields[name])
        if _is_absent(value, known, _hints(owner)[name]):
            return None
        if current is None and known.creates:
            current = owner()
    if current is None:
        makers = [f for f in fields if setting_of(fields[f]).creates]
        above = ".".join(whole.split(".")[: -len(place)])
        how = f"; --set {above}.{makers[0]}=... makes one" if makers else f"; choose one first: --set {above}=..."
        raise UserError(f"{told}: there is no {above} to change{how}")
    return _assigned(current, place, value, told, whole)


def _in_several(
    current: tuple[Any, ...], kind: type[Component], place: Sequence[str], value: Any, told: str, whole: str
) -> Any:
    """A setting of one of the parts that a field holds."""
    classes = {_named(own): own for own in _family(kind)}
    named = place[0].replace("_", "-")
    if named not in classes:
        above = ".".join(whole.split(".")[: -len(place)])
        raise UserError(f"{told}: {above} holds no {named!r}{near(named, classes)}; there are {', '.join(classes)}")
    if len(place) == 1:
        raise UserError(f"{told}: say which setting of {named}: {', '.join(_hints(classes[named]))}")
    at = next((i for i, part in enumerate(current) if type(part) is classes[named]), None)
    new = _in_one(current[at] if at is not None else None, classes[named], place[1:], value, told, whole)
    rest = [new if i == at else part for i, part in enumerate(current)] + ([new] if at is None else [])
    return tuple(part for part in rest if part is not None)


def _chosen(value: Any, kind: type[Component], several: bool, hint: Any, known: Setting, told: str) -> Any:
    """A whole part, by its name, by "my.py:name", or as it is."""
    choices = known.choices or {}
    word = str(value).lower() if isinstance(value, bool) else value
    if isinstance(word, str) and word in choices:
        return choices[word]
    optional = type(None) in get_args(hint) or several
    if optional and (value is None or value == "none"):
        return () if several else None
    if isinstance(value, str) and ":" in value:
        value = load_named(value)
        value = value() if isinstance(value, type) else value
    if isinstance(value, kind):
        return (value,) if several else value
    names = ", ".join([*choices, *(["none"] if optional else []), "my.py:NAME"])
    raise UserError(f"{told} is one of {names}, not {value!r}{near(str(value), choices)}")


def _unknown(kind: type[Any], told: str, place: Sequence[str], whole: str, names: Sequence[str]) -> str:
    above = ".".join(whole.split(".")[: -len(place)])
    if above:
        return (
            f"{told}: {above} has no setting {place[0]!r}{near(place[0], names)}; it has {', '.join(names) or 'none'}"
        )
    known = [
        *(".".join(place) for place, _, _, _ in _knobs(kind, ())),
        *(f"--{name.replace('_', '-')}" for name in flags(kind)),
    ]
    return f"{told}: no part is called {place[0]!r}{near(told, known)}; there are {', '.join(names)}"
