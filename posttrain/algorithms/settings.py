"""Access to every setting of every component of an algorithm by its place: "surrogate.high", "kl.control.target".

A place is a path of fields of the algorithm and of its components; if a field has several components, the path contains
the name of the component's class ("shaping.soft-overlong.cache"). A flag such as "clip_high" is declared with its
setting, and applies to all places that have the setting.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from posttrain.algorithms.algorithm_base import AlgorithmBase
from posttrain.core.coerce import convert, fits, type_in_words
from posttrain.core.component import NEVER, Component, Setting, SettingRange, setting_of
from posttrain.core.messages import dashed, near, short
from posttrain.core.types import UserError
from posttrain.system.user_code import load_named

Place = tuple[str, ...]
AnyAlgorithm = TypeVar("AnyAlgorithm", bound=AlgorithmBase)

LABELS = ("name", "paper", "stated", "idea", "best_for")
"""Fields of an algorithm that are not settings."""


@dataclass(frozen=True)
class Flag:
    """Short name of a setting, and the places it can set."""

    name: str  # with underscores
    help: str
    type: Any  # common type of the values at all places
    places: tuple[tuple[Place, type[Component]], ...]  # places of the setting, and the component's class at each
    first_hour: bool = False  # whether --help shows it, and not only --help-all


def choose(algorithm: AnyAlgorithm, settings: Mapping[str, Any]) -> AnyAlgorithm:
    """Return the algorithm with those settings applied that choose whole components. Raises as `change`."""
    return change(algorithm, {name: value for name, value in settings.items() if _rank(type(algorithm), name) == 0})


def change(algorithm: AnyAlgorithm, settings: Mapping[str, Any]) -> AnyAlgorithm:
    """Return the algorithm with these settings: names of flags or places -> values, as text or of their type.

    Whole components are chosen first, then created or removed, then changed, so the order of settings does not matter.

    Raises UserError, in one line, for an unknown name, a value that does not fit, a flag whose setting no component of
    the algorithm has, and a setting with two values.
    """
    kind = type(algorithm)
    _refuse_two_values(kind, settings)
    for name in sorted(settings, key=lambda name: _rank(kind, name)):
        flag = flags(kind).get(name.replace("-", "_"))
        if flag is None:
            algorithm = _assigned(algorithm, name.split("."), settings[name], name, name)
            continue
        written = dashed(flag.name)
        there = [place for place, owner in flag.places if _has_component(algorithm, place, owner)]
        there = there or [place for place, owner in flag.places if _knob_at(place, owner).creates][:1]
        if not there:
            raise UserError(f"{written} cannot go with {algorithm.name}: {_hint(kind, flag)}")
        for place in there:
            algorithm = _assigned(algorithm, place, settings[name], written, ".".join(place))
    return algorithm


def _refuse_two_values(kind: type[AlgorithmBase], settings: Mapping[str, Any]) -> None:
    """Raise UserError if a setting is given by its flag and by its place with different values."""
    by_name = {name.replace("-", "_"): name for name in settings}
    for plain, name in by_name.items():
        flag = flags(kind).get(plain)
        for place, _ in flag.places if flag else ():
            other = by_name.get(".".join(place).replace("-", "_"))
            if other not in (None, name) and str(settings[other]) != str(settings[name]):
                written = f"{dashed(plain)} {settings[name]} and --set {other}={settings[other]}"
                raise UserError(f"{written} are the same setting: leave one of them out")


def flags(kind: type[AlgorithmBase]) -> dict[str, Flag]:
    """Return all flags of a kind of algorithm, by name."""
    if kind not in _flags:
        found: dict[str, list[tuple[Place, type[Component], Any, Setting]]] = {}
        for place, owner, hint, declared in _declared_settings(kind, ()):
            if declared.flag:
                found.setdefault(declared.flag.replace("-", "_"), []).append((place, owner, hint, declared))
        _flags[kind] = {
            name: Flag(
                name,
                every[0][3].help,
                _common_type(every),
                tuple((place, owner) for place, owner, _, _ in every),
                any(known.first_hour for *_, known in every),
            )
            for name, every in found.items()
        }
    return _flags[kind]


_flags: dict[type[AlgorithmBase], dict[str, Flag]] = {}


def settings_of(algorithm: AlgorithmBase) -> dict[str, Any]:
    """Return every setting of an algorithm: place -> value, or the name of a whole component that can be chosen."""
    return dict(_values(algorithm, ()))


def check_components(algorithm: AlgorithmBase) -> None:
    """Raise UserError if a field of a user's own algorithm has a value that is not of the declared component class."""
    for f in dataclasses.fields(algorithm):
        value, hint = getattr(algorithm, f.name), _hints(type(algorithm))[f.name]
        kind, several = _component_class(hint)
        if kind is not None and not fits(value, hint):
            wanted = (
                f"a tuple of components of kind {kind.__name__}" if several else f"a component of kind {kind.__name__}"
            )
            raise UserError(f"{algorithm.name}: {f.name} must be {wanted}, not {short(value)}")
    for place, part, name in _settings_at(algorithm, ()):
        value, hint = getattr(part, name), _hints(type(part))[name]
        if not fits(value, hint):
            raise UserError(f"{algorithm.name}: {place} must be {type_in_words(hint)}, not {short(value)}")


def check_ranges(algorithm: AlgorithmBase) -> None:
    """Raise UserError for a setting outside its range, since a user's own algorithm may have any value."""
    for place, part, name in _settings_at(algorithm, ()):
        known = setting_of(_fields(type(part))[name])
        if known.bounds != SettingRange():
            known.bounds.check(f"{algorithm.name}: {place}", getattr(part, name))


def _settings_at(part: Any, above: Place) -> Iterator[tuple[str, Any, str]]:
    """Yield (place, its component, its name) of every plain setting."""
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
        if isinstance(part, AlgorithmBase) and f.name in LABELS:
            continue
        value, choices = getattr(part, f.name), setting_of(f).choices
        place = (*above, f.name)
        if choices is not None:
            names = [name for name, choice in choices.items() if _same_kind(choice, value)]
            yield ".".join(place), names[0] if names else repr(value)
        elif not isinstance(value, (Component, tuple)) and _component_class(_hints(type(part))[f.name])[0] is None:
            yield ".".join(place), value
        for own in value if isinstance(value, tuple) else (value,):
            if isinstance(own, Component):
                yield from _values(own, (*place, _named(type(own))) if isinstance(value, tuple) else place)


def _same_kind(one: Any, other: Any) -> bool:
    """Return whether two choices are of the same kind, regardless of their settings."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return [type(x) for x in one] == [type(x) for x in other] and (not one or one == other or len(one) > 1)
    return type(one) is type(other)


# -- declared settings -------------------------------------------------------------------------------------------------


def _declared_settings(kind: type[Any], above: Place) -> Iterator[tuple[Place, type[Any], Any, Setting]]:
    """Yield (place, its class, its type, its declaration) of each setting of a class and of the components in it."""
    hints = _hints(kind)
    for f in dataclasses.fields(kind):
        declared, hint = setting_of(f), hints[f.name]
        part, several = _component_class(hint)
        if part is None or declared.choices is not None:
            yield (*above, f.name), kind, hint, declared
        for own in _concrete_classes(part) if part is not None else ():
            yield from _declared_settings(own, (*above, f.name, _named(own)) if several else (*above, f.name))


def _fields(kind: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}


def _hints(kind: type[Any]) -> dict[str, Any]:
    if kind not in _evaluated:
        fields = _fields(kind)
        _evaluated[kind] = {name: hint for name, hint in get_type_hints(kind).items() if name in fields}
    return _evaluated[kind]


_evaluated: dict[type[Any], dict[str, Any]] = {}  # cache: evaluating type hints, which are text, is slow


def _component_class(hint: Any) -> tuple[type[Component] | None, bool]:
    """Return (the component class of a field with this type hint or None, whether the field has several components)."""
    if get_origin(hint) is tuple:
        return _component_class(get_args(hint)[0])[0], True
    if get_origin(hint) in (Union, types.UnionType):
        return next((found for found in map(_component_class, get_args(hint)) if found[0]), (None, False))
    return (hint, False) if isinstance(hint, type) and issubclass(hint, Component) else (None, False)


def _concrete_classes(kind: type[Component]) -> list[type[Component]]:
    """Return those of the class and its subclasses that are concrete components."""
    below = [x for child in kind.__subclasses__() for x in _concrete_classes(child)]
    return ([kind] if dataclasses.is_dataclass(kind) else []) + below


def _named(kind: type) -> str:
    """Return the name of a class in places: SoftOverlong -> soft-overlong."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower()


def _common_type(every: Sequence[tuple[Place, type[Component], Any, Setting]]) -> Any:
    """Return the type of a flag that several components have: their common type, or the union of their words."""
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


# -- from a name to a setting ------------------------------------------------------------------------------------------


def _rank(kind: type[AlgorithmBase], name: str) -> int:
    """Return the rank of a setting: 0 chooses a whole component, 1 may create or remove one, 2 changes one."""
    flag = flags(kind).get(name.replace("-", "_"))
    place = flag.places[0][0] if flag else tuple(name.split("."))
    known = next((declared for where, _, _, declared in _declared_settings(kind, ()) if where == place), Setting())
    if known.choices is not None:
        return 0 if len(place) == 1 else 1
    return 1 if known.creates else 2


def _knob_at(place: Place, owner: type[Component]) -> Setting:
    return setting_of(_fields(owner)[place[-1]])


def _has_component(algorithm: AlgorithmBase, place: Place, owner: type[Component]) -> bool:
    """Return whether the algorithm has a component of this class at the place of this setting."""
    found: Any = algorithm
    for name in place[:-1]:
        if isinstance(found, tuple):
            found = next((part for part in found if _named(type(part)) == name), None)
        else:
            found = getattr(found, name)
    return isinstance(found, owner)


def _hint(kind: type[AlgorithmBase], flag: Flag) -> str:
    """Return a hint at options that add a component with the setting of this flag, for messages."""
    brings = []
    for other in flags(kind).values():
        known = _knob_at(*other.places[0])
        for word, part in (known.choices or {}).items():
            if any(isinstance(part, owner) for _, owner in flag.places):
                brings.append(f"{dashed(other.name)} {word}")
    if brings:
        return f"none of its components has that setting; one that has it comes with {' or '.join(brings)}"
    makers = [
        dashed(other.name)
        for other in flags(kind).values()
        for place, owner in other.places
        if any(owner is own for _, own in flag.places) and _knob_at(place, owner).creates
    ]
    fields = _fields(kind)
    brought = [setting_of(fields[place[0]]).brought for place, _ in flag.places if setting_of(fields[place[0]]).brought]
    how = " or ".join(dict.fromkeys(makers or brought))
    return (
        f"there is no such component to change; {how} brings one" if how else "none of its components has that setting"
    )


def _assigned(part: Any, place: Sequence[str], value: Any, written: str, whole: str) -> Any:
    """Return the component (or algorithm) with one setting changed. `written`: the name that the user gave; `whole`:
    the full place.
    """
    hints = _hints(type(part))
    name = place[0].replace("-", "_")
    if name not in hints or name in LABELS:
        raise UserError(_unknown(type(part), written, place, whole, [h for h in hints if h not in LABELS]))
    current, hint, known = getattr(part, name), hints[name], setting_of(_fields(type(part))[name])
    kind, several = _component_class(hint)
    if len(place) > 1:
        assert kind is None or isinstance(kind, type)
        if kind is None:
            raise UserError(
                f"{written}: {'.'.join(whole.split('.')[: -len(place) + 1])} is a single value and has no settings"
            )
        new = (_in_several if several else _in_one)(current, kind, place[1:], value, written, whole)
    elif kind is not None:
        new = _chosen(value, kind, several, hint, known, written)
    else:
        new = _read(value, hint, known, written)
    return replace(part, **{name: new})


def _read(value: Any, hint: Any, known: Setting, written: str) -> Any:
    """Convert and check the value of a plain setting."""
    new = convert(value, hint, written)
    if known.off is not NEVER and new == known.off:
        return None
    known.bounds.check(written, new)
    return new


def _is_absent(value: Any, known: Setting, hint: Any) -> bool:
    """Return whether this value removes the component."""
    if known.absent is NEVER:
        return False
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        return type(None) not in get_args(hint)  # None is not a value of the setting itself
    if isinstance(known.absent, str):
        return bool(value == known.absent)
    try:
        return bool(float(value) == known.absent)
    except (TypeError, ValueError):
        return False


def _in_one(current: Any, kind: type[Component], place: Sequence[str], value: Any, written: str, whole: str) -> Any:
    """Change a setting of a field's single component, which may have to be created."""
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
        raise UserError(f"{written}: there is no {above} to change{how}")
    return _assigned(current, place, value, written, whole)


def _in_several(
    current: tuple[Any, ...], kind: type[Component], place: Sequence[str], value: Any, written: str, whole: str
) -> Any:
    """Change a setting of one of a field's components."""
    classes = {_named(own): own for own in _concrete_classes(kind)}
    named = place[0].replace("_", "-")
    if named not in classes:
        above = ".".join(whole.split(".")[: -len(place)])
        raise UserError(f"{written}: {above} has no {named!r}{near(named, classes)} (there are: {', '.join(classes)})")
    if len(place) == 1:
        raise UserError(f"{written}: name a setting of {named}: {', '.join(_hints(classes[named]))}")
    at = next((i for i, part in enumerate(current) if type(part) is classes[named]), None)
    new = _in_one(current[at] if at is not None else None, classes[named], place[1:], value, written, whole)
    rest = [new if i == at else part for i, part in enumerate(current)] + ([new] if at is None else [])
    return tuple(part for part in rest if part is not None)


def _chosen(value: Any, kind: type[Component], several: bool, hint: Any, known: Setting, written: str) -> Any:
    """Return a whole component, given by name, as "my.py:name", or as an object."""
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
    raise UserError(f"{written} is one of {names}, not {value!r}{near(str(value), choices)}")


def _unknown(kind: type[Any], written: str, place: Sequence[str], whole: str, names: Sequence[str]) -> str:
    above = ".".join(whole.split(".")[: -len(place)])
    if above:
        listed = ", ".join(names) or "none"
        return f"{written}: {above} has no setting {place[0]!r}{near(place[0], names)} (it has: {listed})"
    known = [
        *(".".join(place) for place, _, _, _ in _declared_settings(kind, ())),
        *(dashed(name) for name in flags(kind)),
    ]
    every = f" (there are: {', '.join(names)})"
    return f"{written}: no component {place[0]!r}{near(written, known) or every}"
