"""An endpoint /metrics for Prometheus: the values of the last step, in its text format."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from posttrain.runs.tracking.adapters import flat
from posttrain.runs.tracking.tracker import Status, TrackedRun, Tracker

PORT = 9464  # by convention that of exporters of OpenTelemetry


class PrometheusTracker(Tracker):
    """--track prometheus:PORT answers on this machine, prometheus:0.0.0.0:PORT on all of its addresses."""

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        host, _, port = run.address.rpartition(":")
        self.labels = {"run": run.name, "group": run.group, "verb": run.verb}
        self.options = {name: str(value) for name, value in flat(run.config).items() if not name.startswith("run.")}
        self.values: dict[str, float] = {}
        self.findings: dict[str, int] = {}
        tracker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.partition("?")[0] == "/metrics"
                body = tracker.page().encode() if found else b""
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer((host or "127.0.0.1", int(port) if port else PORT), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return {"url": f"http://{self.server.server_name if host else '127.0.0.1'}:{self.server.server_port}/metrics"}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {f"posttrain_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": value for name, value in metrics.items()}
        self.values = {**self.values, **values, "posttrain_step": step}

    def finding(self, step: int, name: str, message: str) -> None:
        self.findings = {**self.findings, name: self.findings.get(name, 0) + 1}

    def page(self) -> str:
        """Return the page: gauges of metrics, a counter of findings, and an option of the run in each posttrain_option."""
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
        self.server.shutdown()
