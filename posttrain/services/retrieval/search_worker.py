"""The process that searches for all workers of a run. Its client is `posttrain.services.retriever`.

    run -> process    the folder of the index, pickled; then lists of [number, query, k]
    process -> run    {"ready": identity} or {"failed": a line}; then for each question
                      {"number": n, "found": [[id, contents, score], ...]} or {"number": n, "failed": a line}

Each query is searched by itself: the last bits of a vector may depend on the other texts of a batch.
"""

from __future__ import annotations

import json
import pickle
import socket
from typing import Any

from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.envs.play.worker_protocol import Frames, framed


def main(descriptor: int) -> None:
    """Answer the requests on this socket until it is closed."""
    connection = socket.socket(fileno=descriptor)
    frames = Frames(most=1 << 62)  # the run is trusted

    def send(message: dict[str, Any]) -> None:
        connection.sendall(framed(json.dumps(message).encode()))

    index = None
    while more := connection.recv(1 << 20):
        for content in frames.add(more):
            asked = pickle.loads(content)
            if index is not None:
                for number, query, k in asked:
                    send({"number": number, **_found(index, query, k)})
                continue
            try:
                from posttrain.services.retrieval.passage_index import open_index

                index = open_index(asked)
            except UserError as error:
                return send({"failed": str(error)})
            except Exception as error:  # an error of the user's code, imported with an encoder
                return send({"failed": f"the index in {asked} cannot be opened: {one_line(error)}"})
            send({"ready": index.manifest.fingerprint})


def _found(index: Any, query: str, k: int) -> dict[str, Any]:
    try:
        [hits] = index.search([query], k)
    except UserError as error:
        return {"failed": str(error)}
    return {"found": [[hit.passage.id, hit.passage.contents, hit.score] for hit in hits]}
