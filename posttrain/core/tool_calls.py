"""The tool calls of a message, in OpenAI's form: arguments may be an object, or the text of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

CALLS = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}'
"""The form of a call, for messages."""


def read_calls(given: Any) -> list[dict[str, Any]]:
    """Return the "tool_calls" of a message with arguments as objects. Raises ValueError with what is wrong.

    A call without "function" around its name and arguments, as Qwen's templates take it, gets one.
    """
    found = []
    for each in given if isinstance(given, list) else [None]:
        call: Mapping[str, Any] = each if isinstance(each, Mapping) else {}
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError("a call names no tool")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except RecursionError:
                raise ValueError("its arguments are nested too deeply") from None
            except ValueError:
                raise ValueError("its arguments are text and no JSON") from None
        if not isinstance(arguments, dict) or not isinstance(call.get("id") or "", str):
            raise ValueError("its arguments are no object, or its id is no text")
        around = call if "function" in call else {k: v for k, v in call.items() if k not in function}
        found.append({"type": "function", **around, "function": {**function, "arguments": arguments}})
    return found
