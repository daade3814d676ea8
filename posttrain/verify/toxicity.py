"""Toxicity of a text: by default the share of its words that are on a list, otherwise a classifier's verdict.

The list is short, English and coarse: insults, profanity and threats. It misses polite insults and counts quotations.
It exists so that a run works offline; provide a list or a classifier of your own where precision matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from posttrain.core.types import Invalid
from posttrain.verify.length import words

TOXIC = frozenset(
    "arse arsehole ass asshole assholes bastard bastards bitch bitches bollocks bullshit crap cretin cunt "
    "cunts damn dick dickhead dipshit douche douchebag dumbass fuck fucked fucker fuckers fucking goddamn "
    "idiot idiots imbecile jackass jerk loser losers moron moronic morons motherfucker motherfuckers piss "
    "pissed prick pricks pussy scum scumbag shit shits shitty slut sluts stupid subhuman twat vermin wanker "
    "whore whores worthless".split()
)
THREATS = (
    "kill you", "kill yourself", "hurt you", "beat you up", "hope you die", "go die", "drop dead", "shut up",
    "hate you", "burn in hell", "slit your", "break your",
)  # fmt: skip


def toxicity(
    text: str,
    *,
    listed: Collection[str] = TOXIC,
    phrases: Collection[str] = THREATS,
    classifier: Callable[[str], float | Invalid] | None = None,
) -> float | Invalid:
    """0.0 for a clean text. By default the share of its words that are listed, else the classifier's verdict.

    Whole words in lower case are compared: "classic" is clean. A classifier returns 0.0 to 1.0, or Invalid if its
    service does not answer; any other number is Invalid too.

    >>> toxicity("you stupid idiot")
    0.6666666666666666
    """
    if classifier is not None:
        found = classifier(text)
        if isinstance(found, Invalid):
            return found
        return (
            float(found) if 0 <= found <= 1 else Invalid(f"the classifier gave {found}, which is not between 0 and 1")
        )
    said = [word.lower() for word in words(text)]
    if not said:
        return 0.0
    hits = sum(word in listed for word in said)
    whole = f" {'  '.join(said)} "  # two spaces, so that successive phrases do not share one
    for phrase in map(str.split, phrases):
        hits += whole.count(f" {'  '.join(phrase)} ") * len(phrase)
    return min(1.0, hits / len(said))


def clean(
    text: str, most: float = 0.0, *, classifier: Callable[[str], float | Invalid] | None = None
) -> float | Invalid:
    """1.0 if the toxicity of a text is at most `most`, else 0.0.

    >>> clean("What a lovely day.")
    1.0
    """
    found = toxicity(text, classifier=classifier)
    return found if isinstance(found, Invalid) else float(found <= most + math.ulp(1.0))
