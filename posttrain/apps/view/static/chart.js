// Curves over the steps: uPlot with our colours, the events of the run, and steps that open when they are clicked.

import { Canvas, colour, html, useEffect, useRef, useState } from "./ui.js";
import { f } from "./format.js";

const COLOURS = ["blue", "red", "green", "pink", "yellow", "sky"];
const FEW = 30; // points that are shown as they are; of more, the running mean over faint raw values

const nameOf = (line, i) => line.colour || COLOURS[i % COLOURS.length];

function smooth(values) {
  const window = Math.ceil(values.length / 50);
  const found = new Array(values.length);
  for (let i = 0; i < values.length; i++) {
    let sum = 0;
    let count = 0;
    for (let j = Math.max(0, i - window); j <= Math.min(values.length - 1, i + window); j++) {
      if (values[j] !== null) {
        sum += values[j];
        count++;
      }
    }
    found[i] = count ? sum / count : null;
  }
  return found;
}

function stacked(lines) {
  const sums = new Array(lines[0].values.length).fill(0);
  return lines.map((line) => line.values.map((v, i) => (sums[i] += v || 0)));
}

/** {data, series, bands} of uPlot. */
function laid(panel) {
  const data = [panel.steps];
  const series = [{}];
  const bands = [];
  const hidden = { stroke: "transparent", points: { show: false } };
  if (panel.band) {
    data.push(panel.band.high, panel.band.low);
    series.push(hidden, hidden);
    bands.push({ series: [1, 2], fill: colour("blue", 0.18) });
  }
  if (panel.stack) {
    const sums = stacked(panel.lines);
    for (let i = panel.lines.length - 1; i >= 0; i--) {
      const name = nameOf(panel.lines[i], i);
      data.push(sums[i]);
      series.push({ stroke: colour(name), width: 0, fill: colour(name), points: { show: false } });
    }
    return { data, series, bands };
  }
  panel.lines.forEach((line, i) => {
    const name = nameOf(line, i);
    const few = panel.steps.length < FEW || line.dots;
    if (!few) {
      data.push(line.values);
      series.push({ stroke: colour(name, 0.28), width: 1, points: { show: false }, spanGaps: true });
    }
    data.push(few ? line.values : smooth(line.values));
    series.push({ stroke: colour(name), width: 1.7, spanGaps: true, points: { show: few, size: 4, stroke: colour(name), fill: colour("panel") } });
  });
  return { data, series, bands };
}

function scaleOf(panel) {
  if (panel.stack) return { range: [0, 1] };
  if (panel.log && panel.lines.every((line) => line.values.every((v) => v === null || v > 0))) return { distr: 3 };
  if (panel.zero) return { range: (u, low, high) => [Math.min(0, low || 0), (high || 1) * 1.06] };
  return {};
}

/** A panel: {title, steps, lines: [{name, values, colour}], band, stack, zero, log}. `events`: [{step, colour}]. */
export function Chart({ panel, events = [], onStep, height = 108, sync = "steps" }) {
  const place = useRef();
  const shown = useRef();
  useEffect(() => {
    let plot = null;
    let width = 0; // as of the last layout: to ask for it makes the browser lay out the page
    const draw = () => {
      if (!width) return;
      if (plot) plot.destroy();
      const { data, series, bands } = laid(panel);
      const axis = { stroke: colour("faint"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "10px system-ui, sans-serif" };
      plot = new window.uPlot(
        {
          width: Math.max(120, width), height, padding: [5, 9, 0, 0], series, bands, legend: { show: false },
          cursor: { sync: { key: sync }, points: { show: false }, y: false, drag: { x: true, y: false } },
          scales: { x: { time: false }, y: scaleOf(panel) },
          axes: [{ ...axis, size: 20, space: 60 }, { ...axis, size: 44, space: 24, ...(panel.log ? { grid: { ...axis.grid, filter: decades } } : {}), values: (u, ticks) => ticks.map((v) => (v === null ? "" : f(v))) }],
          hooks: {
            draw: [(u) => marks(u, events)],
            setCursor: [(u) => told(u, panel, shown.current)],
          },
        },
        data,
        place.current,
      );
      if (onStep) {
        plot.over.addEventListener("click", () => {
          if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) onStep(panel.steps[plot.cursor.idx]);
        });
      }
    };
    told(null, panel, shown.current);
    const watch = new ResizeObserver(([entry]) => {
      if (entry.contentRect.width === width) return;
      width = entry.contentRect.width;
      if (plot) plot.setSize({ width: Math.max(120, width), height });
      else draw();
    });
    watch.observe(place.current);
    addEventListener("theme", draw);
    return () => {
      removeEventListener("theme", draw);
      watch.disconnect();
      if (plot) plot.destroy();
    };
  }, [panel, events]);
  return html`<div class="card" title=${panel.about || ""}>
    <div class="chart-head"><b title=${panel.title}>${panel.title}</b>
      <span class="keys" title=${panel.lines.map((line) => line.name).join(", ")}><span class="soft" ref=${shown}></span>${panel.lines.length > 1 ? panel.lines.map((line, i) => html`<span class=${`key c-${nameOf(line, i)}`}>${line.name}</span>`) : ""}</span></div>
    <div ref=${place} style=${{ height: `${height}px` }}></div></div>`;
}

const decades = (u, splits) => splits.map((v) => (v > 0 && Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9 ? v : null));

function told(u, panel, element) {
  if (!element) return;
  const i = u?.cursor.idx;
  const values = panel.lines.map((line) => (i === null || i === undefined ? line.values.findLast((v) => v !== null) : line.values[i]));
  const step = i === null || i === undefined ? "" : `step ${panel.steps[i]}: `;
  element.textContent = panel.lines.length > 1 && !step ? "" : step + values.map((v) => f(v)).join(" · ");
}

function marks(u, events) {
  const pen = u.ctx;
  pen.save();
  pen.setLineDash([4, 3]);
  for (const event of events) {
    const x = u.valToPos(event.step, "x", true);
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
    pen.strokeStyle = colour(event.colour);
    pen.beginPath();
    pen.moveTo(x, u.bbox.top);
    pen.lineTo(x, u.bbox.top + u.bbox.height);
    pen.stroke();
  }
  pen.restore();
}

/** Bars of a histogram {low, width, bins: [[number, count]]}; dragging over them chooses a range. */
export function Histogram({ data, label, chosen, choose }) {
  const drag = useRef(null);
  const [span, setSpan] = useState(null); // bins that the keyboard has chosen: [from, to]
  const bins = data.bins || [];
  const last = bins.length ? bins.at(-1)[0] : 0;
  const many = Math.max(last + 1, 1);
  const valueAt = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    return Math.max(0, Math.min(many, ((event.clientX - box.left) / box.width) * many));
  };
  const range = (from, to) => {
    const first = Math.floor(Math.min(from, to));
    const end = Math.max(first + 1, Math.ceil(Math.max(from, to)));
    const exact = (bin) => Number((data.low + bin * data.width).toPrecision(10));
    choose(`${exact(first)}..${Number((data.low + end * data.width - data.width * 1e-6).toPrecision(10))}`);
  };
  const draw = (pen, w, h) => {
    const most = Math.max(...bins.map(([, n]) => n), 1);
    const step = w / many;
    pen.fillStyle = colour("sky");
    for (const [bin, n] of bins) {
      const tall = Math.max(1.5, ((h - 2) * Math.sqrt(n)) / Math.sqrt(most));
      pen.fillRect(bin * step + 0.5, h - tall, Math.max(1, step - 1), tall);
    }
    if (span) {
      pen.fillStyle = colour("blue", 0.25);
      pen.fillRect(span[0] * step, 0, (span[1] - span[0] + 1) * step, h);
    }
    pen.strokeStyle = colour("line");
    pen.beginPath();
    pen.moveTo(0, h - 0.5);
    pen.lineTo(w, h - 0.5);
    pen.stroke();
  };
  const pressed = (e) => {
    const [from, to] = span || [0, 0];
    const by = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    const within = (bin) => Math.max(0, Math.min(many - 1, bin));
    if (by && bins.length) setSpan(e.shiftKey ? [from, Math.max(from, within(to + by))] : [within((span ? from : -1) + by), within((span ? from : -1) + by)]);
    else if (e.key === "Enter" && span) range(span[0], span[1] + 1);
    else if (e.key === "Escape") chosen && choose("");
    else return;
    if (!by) setSpan(null);
    e.preventDefault();
    e.stopPropagation();
  };
  return html`<div class="card hist"><div class="chart-head"><b>${label}</b><span class="faint">${chosen ? html`<button class="small" onClick=${() => choose("")} title="take this filter away">× ${chosen}</button>` : data.none ? `${data.none.toLocaleString("en")} none` : ""}</span></div>
    <${Canvas} draw=${draw} deps=${[data, span]} label=${`histogram of ${label}`} tabindex="0" onKeyDown=${pressed} onBlur=${() => setSpan(null)}
      onPointerDown=${(e) => { drag.current = valueAt(e); e.currentTarget.setPointerCapture(e.pointerId); }}
      onPointerUp=${(e) => { if (drag.current !== null && bins.length) range(drag.current, valueAt(e)); drag.current = null; }} />
    <div class="ends"><span>${f(data.least ?? data.low)}</span><span>${data.low === null || data.low === undefined ? "" : f(data.high)}</span></div></div>`;
}
