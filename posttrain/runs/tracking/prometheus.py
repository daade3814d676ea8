"""An endpoint /metrics for Prometheus, with the values of the last step in its text format."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Mapping

from aiohttp import web

from posttrain.runs.tracking.adapters import logged_options
from posttrain.runs.tracking.tracker import Status, TrackedRun, Tracker
from posttrain.system.http_front import HOST, bound, refused
from posttrain.system.http_server import serving

PORT = 9464  # the usual port of OpenTelemetry's exporters


class PrometheusTracker(Tracker):
    """Serves on this machine for --track prometheus:PORT, on all of its addresses for prometheus:0.0.0.0:PORT."""

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        host, _, port = run.address.rpartition(":")
        self.labels = {"run": run.name, "group": run.group, "verb": run.verb}
        self.options = {
            name: str(value) for name, value in logged_options(run.config).items() if not name.startswith("run.")
        }
        self.values: dict[str, float] = {}
        self.findings: dict[str, int] = {}
        self._host, self._loop, self._end = host or HOST, asyncio.new_event_loop(), asyncio.Event()
        listening = bound(self._host, int(port) if port else PORT)
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(listening),), daemon=True
        )
        self._thread.start()
        return {"url": f"http://{self._host}:{listening.getsockname()[1]}/metrics"}

    async def _serve(self, listening: socket.socket) -> None:
        application = web.Application()
        application.router.add_get("/metrics", self._answer)
        async with serving(application, listening):
            await self._end.wait()

    async def _answer(self, request: web.Request) -> web.Response:
        if (wrong := refused(request.method, request.headers.items(), self._host)) is not None:
            return web.Response(status=wrong[0], text=wrong[1])
        return web.Response(text=self.page(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {f"posttrain_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": value for name, value in metrics.items()}
        self.values = {**self.values, **values, "posttrain_step": step}

    def finding(self, step: int, name: str, message: str) -> None:
        self.findings = {**self.findings, name: self.findings.get(name, 0) + 1}

    def page(self) -> str:
        """Return the page: a gauge per metric, a counter of findings, and a posttrain_option for each option of the
        run.
        """
        lines = []
        for name, value in self.values.items():
            lines += [f"# TYPE {name} gauge", f"{name}{self._labels()} {float(value)!r}"]
        lines += ["# TYPE posttrain_findings_total counter"]
        lines += [f"posttrain_findings_total{self._labels(name=n)} {count}" for n, count in self.findings.items()]
        lines += ["# TYPE posttrain_option gauge"]
        lines += [f"posttrain_option{self._labels(name=n, value=text)} 1" for n, text in self.options.items()]
        return "\n".join(lines) + "\n"

    def _labels(self, **more: str) -> str:
        escaped = {
            name: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            for name, text in {**self.labels, **more}.items()
        }
        return "{" + ",".join(f'{name}="{text}"' for name, text in escaped.items()) + "}"

    def finish(self, status: Status) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
