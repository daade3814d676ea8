// Two runs, or two checkpoints of one, paired on the same tasks.

import { Chart } from "./chart.js";
import { f, line, shown, signed, visible, whole } from "./format.js";
import { change, go, here, to } from "./net.js";
import { Empty, html, Problem, useAnswer, useKeys } from "./ui.js";

const X0 = 96;
const WIDE = 420;

export function Compare({ run, runs, query }) {
  const stamp = JSON.stringify(runs.map((r) => r.stamp[0]));
  const { data, problem, waiting } = useAnswer("compare", { a: query.a, b: query.b, of_a: query.of_a, of_b: query.of_b }, stamp);
  const swap = () => {
    if (!data) return;
    const now = { a: data.a.run, b: data.b.run, of_a: data.a.of, of_b: data.b.of, ...here().query }; // what is shown may still be the one before
    change({ a: now.b, b: now.a, of_a: now.of_b, of_b: now.of_a });
  };
  useKeys({ s: swap });
  if (problem) return html`<${Problem} text=${problem} />`;
  if (!data) return html`<${Empty}>pairing …</${Empty}>`;
  return html`<div class=${waiting}>
    <div class="row gap"><${Side} label="A" side=${data.a} runs=${runs} names=${["a", "of_a"]} /><button onClick=${swap} title="swap ( s )">⇄</button><${Side} label="B" side=${data.b} runs=${runs} names=${["b", "of_b"]} /></div>
    ${data.a.run === data.b.run ? "" : html`<${Parting} a=${data.a.run} b=${data.b.run} stamp=${stamp} />`}
    ${data.warnings.map((w) => html`<div class="note">${visible(w)}</div>`)}
    ${data.n === undefined ? html`<${Empty}>Nothing to pair: a run needs evaluations, or tasks that are visited, with their rollouts.</${Empty}>` : data.n === 0 ? html`<${Empty}>No task is in both: ${whole(data.alone.a)} are in A alone, ${whole(data.alone.b)} in B alone.</${Empty}>` : html`<${Paired} data=${data} />`}
    ${data.options.length ? html`<div class="card gap"><h2>Options that differ</h2><table><thead><tr><th>option</th><th>A</th><th>B</th></tr></thead><tbody>${data.options.map((o) => html`<tr><td class="mono">${o.name}</td><td class="mono">${shown(o.a)}</td><td class="mono">${shown(o.b)}</td></tr>`)}</tbody></table></div>` : ""}
    ${data.curves.length ? html`<div class="others">${data.curves.map((panel) => html`<${Chart} key=${panel.title} panel=${panel} onStep=${(step) => go(to(data.b.run, "rollouts", [], { step }))} />`)}</div>` : ""}</div>`;
}

/** The first difference of the two runs, with a link to both. */
function Parting({ a, b, stamp }) {
  const { data, problem } = useAnswer("parting", { a, b }, stamp);
  if (problem) return html`<${Problem} text=${problem} />`;
  if (!data) return html`<div class="card gap soft">looking for the first difference …</div>`;
  const at = data.first;
  const n = data.numbers;
  const one = (run, index, token) => to(run, "rollout", [(at || n).part, index], { t: token });
  return html`<div class="card gap parting"><div><b>${at ? "First difference" : "Do they differ?"}</b> <span class="untrusted">${visible(data.says)}</span> <span class="soft untrusted">${visible(data.why || "")}</span></div>
    ${at ? html`<div class="row tight"><span class="mono untrusted soft">…${line(at.before)}</span>${[["A", a, at.a], ["B", b, at.b]].map(([name, run, index], i) => html`<a class="pill" href=${one(run, index, at.at)}><b class=${i ? "up" : "down"}>${name}</b> ${at.pieces[i] === null ? "ends" : html`<span class="mono untrusted">“${line(at.pieces[i])}”</span>`}</a>`)}
      <a href=${to(a, "pair", [at.part, at.a, b, at.part, at.b])}>both groups side by side</a></div>` : n ? html`<div class="row tight"><a href=${one(a, n.index)}>rollout ${n.index} of step ${n.step} in A</a><a href=${one(b, n.index)}>in B</a></div>` : ""}</div>`;
}

function Side({ label, side, runs, names }) {
  const [run, of] = names;
  return html`<b class=${label === "A" ? "down" : "up"}>${label}</b>
    <select value=${side.run} onChange=${(e) => change({ [run]: e.target.value, [of]: "" })} aria-label=${`run ${label}`}>${runs.map((r, i) => html`<option value=${i}>${visible(r.name)}</option>`)}</select>
    <select value=${side.of} onChange=${(e) => change({ [of]: e.target.value })} aria-label=${`which rollouts of ${label}`}>${side.choices.map((c) => html`<option value=${c.name}>${c.says}</option>`)}</select>`;
}

function Paired({ data }) {
  const open = (task) => go(to(data.a.run, "pair", [task.a.part, task.a.index, data.b.run, task.b.part, task.b.index]));
  return html`<div class="compare-grid gap"><div>
      <div class="card gap"><h2>Paired on the same ${whole(data.n)} tasks</h2><${Means} data=${data} />
        <div class="soft small">B is better on ${whole(data.better)}, worse on ${whole(data.worse)}, the same on ${whole(data.n - data.better - data.worse)}${data.alone.a + data.alone.b ? `; ${whole(data.alone.a)} tasks are in A alone, ${whole(data.alone.b)} in B alone` : ""}. 95% intervals over tasks.</div></div>
      <div class="card"><h2>Task by task</h2><span class="soft small">mean reward in A and in B; the number is of tasks</span><${Grid} grid=${data.grid} /></div></div>
    <div>${[["Lost most", data.lost, "B does worse"], ["Gained most", data.gained, "B does better"], ["Never solved", data.never, "lowest reward in both"]].map(([title, rows, says]) => (rows.length ? html`<${Tasks} ...${{ title, rows, says, open }} />` : ""))}</div></div>`;
}

function Means({ data }) {
  const { a, b } = data.mean;
  const d = data.difference;
  const values = [a.low ?? a.mean, a.high ?? a.mean, b.low ?? b.mean, b.high ?? b.mean, 0, d.low ?? d.mean, d.high ?? d.mean];
  const low = Math.min(...values);
  const high = Math.max(...values, low + 1e-9);
  const x = (v) => X0 + ((v - low) / (high - low)) * (WIDE - X0 - 14);
  const row = (y, name, m, kind) => html`<g><text x="0" y=${y + 4} class="ink">${name}</text><text x=${X0 - 12} y=${y + 4} text-anchor="end">${kind === "d" ? signed(m.mean) : f(m.mean)}</text>${m.low === null ? "" : html`<line x1=${x(m.low)} x2=${x(m.high)} y1=${y} y2=${y} class="strong"></line>`}<circle cx=${x(m.mean)} cy=${y} r="4.5" class=${kind}><title>${m.low === null ? `${f(m.mean)}, ${m.why}` : `${f(m.mean)} [${f(m.low)}, ${f(m.high)}]`}</title></circle></g>`;
  return html`<svg width=${WIDE} height="104" role="img" aria-label="means with intervals">${[low, (low + high) / 2, high].map((v) => html`<g><line x1=${x(v)} x2=${x(v)} y1="6" y2="84" class="axis"></line><text x=${x(v)} y="98" text-anchor="middle">${f(v)}</text></g>`)}
    <line x1=${x(0)} x2=${x(0)} y1="6" y2="84" class="axis" stroke-width="2"></line>${row(18, "A", a, "a")}${row(44, "B", b, "b")}${row(70, "B − A", d, "d")}</svg>
    <div><b>${signed(d.mean)}</b> ${d.low === null ? html`<span class="soft small">${d.why}</span>` : `[${signed(d.low)}, ${signed(d.high)}]`}</div>`;
}

function Grid({ grid }) {
  const most = Math.max(...grid.counts.flat());
  const size = 38;
  const at = (i) => grid.low + ((grid.high - grid.low) * i) / 8;
  return html`<svg width="410" height="396" role="img" aria-label="tasks by their mean reward in A and in B">${grid.counts.map((column, i) => column.map((n, j) => {
    const strength = n ? 0.12 + 0.8 * (Math.log1p(n) / Math.log1p(most)) : 0;
    return html`<g><rect x=${44 + i * size} y=${6 + (8 - j) * size} width=${size - 2} height=${size - 2} class=${n ? "cell" : "empty"} fill-opacity=${n ? strength : 1}><title>${`A ${f(at(i))}, B ${f(at(j))}: ${whole(n)} tasks`}</title></rect>${n ? html`<text x=${44 + i * size + size / 2 - 1} y=${6 + (8 - j) * size + size / 2 + 3} text-anchor="middle" class=${strength > 0.5 ? "inverse" : "ink"}>${n}</text>` : ""}</g>`;
  }))}${[0, 4, 8].map((i) => html`<g><text x=${44 + i * size + size / 2} y="364" text-anchor="middle">${f(at(i))}</text><text x="38" y=${6 + (8 - i) * size + size / 2 + 3} text-anchor="end">${f(at(i))}</text></g>`)}<text x="214" y="384" text-anchor="middle">A</text><text x="4" y="178">B</text></svg>`;
}

function Tasks({ title, rows, says, open }) {
  return html`<div class="card list gap" style=${{ maxHeight: "330px" }}><table><thead><tr><th>${title} <span class="faint">${says}</span></th><th class="n">A</th><th class="n">B</th><th class="n">B − A</th></tr></thead>
    <tbody>${rows.map((t) => html`<tr class="r" onClick=${() => open(t)}><td class="mono untrusted" dir="ltr"><a href="" onClick=${(e) => { e.preventDefault(); open(t); }}>${line(t.task)}</a>${t.side ? ` ${line(t.side)}` : ""}</td><td class="n">${f(t.a.mean)}</td><td class="n">${f(t.b.mean)}</td><td class=${`n ${t.difference > 0 ? "up" : t.difference < 0 ? "down" : ""}`}>${signed(t.difference)}</td></tr>`)}</tbody></table></div>`;
}
