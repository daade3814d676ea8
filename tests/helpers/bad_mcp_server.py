"""An MCP server without the library, which begins well and then does what the called tool's name says."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

TOOLS = (
    "echo",
    "hang",
    "die",
    "rubbish",
    "no_result",
    "wrong_id",
    "endless",
    "deaf",
    "odd",
    "many",
    "halves",
    "picture",
)


def send(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def result(asked: dict[str, Any], value: Any) -> None:
    send({"id": asked["id"], "result": value})


def said(text: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}]}


def call(asked: dict[str, Any]) -> None:
    name = asked["params"]["name"]
    if name == "echo":
        result(asked, said(json.dumps(asked["params"].get("arguments"))))
    elif name == "hang":
        time.sleep(1000)
    elif name == "die":
        os._exit(1)
    elif name == "rubbish":
        print("}{ this is no JSON \u0000\n[]\n5", flush=True)
    elif name == "no_result":
        result(asked, {"content": "five"})
    elif name == "wrong_id":
        send({"id": 987654, "result": said("for somebody else")})
    elif name == "endless":
        while True:
            sys.stdout.write("x" * 65536)
    elif name == "odd":
        send({"id": asked["id"], "error": {"code": -32602, "message": "not like that"}})
    elif name == "many":
        result(asked, said("y" * 100_000 + "end"))
    elif name == "picture":
        result(asked, {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]})


def main() -> None:
    if "silent" in sys.argv:
        time.sleep(1000)
    for line in sys.stdin:
        asked = json.loads(line)
        method = asked.get("method")
        if method == "initialize":
            version = asked["params"]["protocolVersion"]
            about = {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "bad", "version": "0"},
            }
            result(asked, about)
        elif method == "tools/list":
            schema = {"type": "object", "properties": {}}
            result(asked, {"tools": [{"name": name, "inputSchema": schema} for name in TOOLS]})
        elif method == "tools/call":
            call(asked)
        elif "id" in asked:
            send({"id": asked["id"], "error": {"code": -32601, "message": "no such method"}})


if __name__ == "__main__":
    main()
