"""Detects the language of a text.

For scripts used almost only by one living language, one word in the script is enough. For all others a classifier of
character n-grams distinguishes 97 languages (py3langid: langid.py of Lui and Baldwin 2012, pure Python, 4 MB,
deterministic). Loading it at its first use takes about a second. On a word or two it guesses.
"""

from __future__ import annotations

import re

LONGEST = 100_000  # most characters read of a text
MOST = 2000  # most sentences read of a text

SCRIPTS = {
    "ja": "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f",
    "ko": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "zh": "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff",
    "el": "\u0370-\u03ff\u1f00-\u1fff",
    "he": "\u0590-\u05ff",
    "hy": "\u0530-\u058f",
    "ka": "\u10a0-\u10ff",
    "th": "\u0e00-\u0e7f",
    "lo": "\u0e80-\u0eff",
    "km": "\u1780-\u17ff",
    "ta": "\u0b80-\u0bff",
    "te": "\u0c00-\u0c7f",
    "kn": "\u0c80-\u0cff",
    "ml": "\u0d00-\u0d7f",
    "gu": "\u0a80-\u0aff",
    "pa": "\u0a00-\u0a7f",
    "si": "\u0d80-\u0dff",
}
"""Language -> the letters of its script, as a character class of a regular expression."""

_OF_SCRIPT = {language: re.compile(f"[{letters}]") for language, letters in SCRIPTS.items()}
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?(?:\$\$|\Z)|https?://\S+", re.DOTALL)
_PIECE = re.compile(r"[^.!?\n\u3002\uff01\uff1f\u2026]+")


def language(text: str) -> str | None:
    """Return the ISO 639-1 code of the main language of a text; None if it has too few letters to decide.

    Fenced and inline code, formulas between $$ and addresses are ignored.

    >>> language("Die Antwort ist zweiundvierzig.")
    'de'
    """
    text = _CODE.sub(" ", text[:LONGEST])
    letters = sum(c.isalpha() for c in text)
    if letters < 2:
        return None
    in_script = {language: len(found.findall(text)) for language, found in _OF_SCRIPT.items()}
    most = max(in_script, key=lambda name: in_script[name])
    if in_script["ja"] and 2 * (in_script["ja"] + in_script["zh"]) > letters:
        return "ja"  # a third of Japanese is written in Chinese characters
    if 2 * in_script[most] > letters:
        return most
    from py3langid import classify

    code, _ = classify(text)
    return None if code == "zxx" else str(code)  # "no linguistic content"


def in_language(text: str, code: str) -> float:
    """1.0 if the main language of the text has this ISO 639-1 code, else 0.0.

    >>> in_language("Les chats dorment toute la journée.", "fr")
    1.0
    """
    return float(language(text) == code)


def language_share(text: str, code: str) -> float:
    """The share of a text's letters that are in sentences of this language; 0.0 for a text without letters.

    DeepSeek-R1 rewards the share of words in the target language, so that thoughts do not mix languages (arXiv
    2501.12948, section 2.3.2). Sentences of fewer than 12 letters, too short to classify, count with the previous
    sentence.

    >>> language_share("The cat sleeps all day long. Die Katze schläft den ganzen Tag.", "en") < 0.6
    True
    """
    pieces: list[str] = []
    for piece in _PIECE.findall(_CODE.sub(" ", text[:LONGEST])):
        if pieces and sum(c.isalpha() for c in piece) < 12:
            pieces[-1] += " " + piece
        else:
            pieces.append(piece)
    own = total = 0
    for piece in pieces[:MOST]:
        letters = sum(c.isalpha() for c in piece)
        total += letters
        own += letters * (language(piece) == code)
    return own / total if total else 0.0
