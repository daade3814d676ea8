// A file of posttrain eval: the parts of a suite, every model on each of them, and the means over parts.

import { f, percent, signed, visible, whole } from "./format.js";
import { go, to } from "./net.js";
import { Empty, html, Problem, useAnswer } from "./ui.js";

const WIDTH = 190;
const TONES = { better: "good", worse: "bad" };

const between = (figure, told = f) => (figure.low === null || figure.low === undefined ? told(figure.mean) : `${told(figure.mean)} [${told(figure.low)}, ${told(figure.high)}]`);

export function Evaluation({ run, words, evaluations }) {
  const at = Number(words[0]) || 0;
  const { data, problem } = useAnswer(`evaluation/${at}`);
  if (problem) return html`<${Problem} text=${problem} />`;
  if (!data) return html`<${Empty}>reading the figures …</${Empty}>`;
  const [own, ...others] = data.models;
  return html`<div class="card gap"><div class="row tight">${evaluations.length > 1 ? html`<select value=${at} aria-label="evaluation" onChange=${(e) => go(to(run, "evaluation", [e.target.value]))}>${evaluations.map((e, i) => html`<option value=${i}>${visible(e.name)}</option>`)}</select>` : html`<h2>${visible(evaluations[at]?.name || "")}</h2>`}
      <span class="pill on">${visible(own)}</span>${others.map((model) => html`<span class="pill">against ${visible(model)}</span>`)}${typeof data.cost === "number" ? html`<span class="pill">judges cost ${f(data.cost)}</span>` : ""}</div>
    ${data.averages.length ? html`<${Averages} data=${data} own=${own} />` : ""}</div>
    <${Parts} data=${data} own=${own} />`;
}

function Averages({ data, own }) {
  const told = (average) => `mean of ${average.parts} part${average.parts === 1 ? "" : "s"}${average.of === "all" ? "" : ` ${average.of}`}`;
  return html`<table><thead><tr><th>mean over parts</th><th>model</th><th>accuracy or reward</th><th>${visible(own)} minus it</th></tr></thead><tbody>${data.averages.map((average) => html`
    <tr><td>${told(average)}</td><td>${visible(own)}</td><td title=${average.figure.why || ""}>${between(average.figure)}</td><td></td></tr>
    ${average.against.map((one) => html`<tr><td></td><td>${visible(one.model)}</td><td title=${one.figure.why || ""}>${between(one.figure)}</td><td title=${one.difference.why || ""}>${between(one.difference, signed)}</td></tr>`)}`)}</tbody></table>`;
}

function Parts({ data, own }) {
  const compared = data.rows.some((row) => row.difference);
  const corrected = data.rows.some((row) => typeof row.wins?.p_holm === "number");
  const ends = data.rows.flatMap(({ figure }) => [figure.low ?? figure.mean, figure.high ?? figure.mean]);
  const [low, high] = [Math.min(0, ...ends), Math.max(1, ...ends)];
  const heads = compared ? [`${visible(own)} minus it`, "won", "lost", "tied", corrected ? "p corrected" : "p", "verdict"] : [];
  return html`<div class="card list"><table><thead><tr><th>part</th><th>model</th><th class="n">tasks</th><th>accuracy or reward</th><th>95% interval, ${f(low)} to ${f(high)}</th>${heads.map((name) => html`<th>${name}</th>`)}<th class="n">length</th><th class="n">cut off</th><th class="n">invalid</th>${data.means.map((name) => html`<th class="n">${visible(name)}</th>`)}</tr></thead>
    <tbody>${data.rows.map((row, i) => html`<tr key=${i} class=${row.own ? "sel" : ""}><td>${row.own ? visible(row.part) : ""}${row.own && row.inside === false ? html` <span class="pill">out of distribution</span>` : ""}</td><td>${visible(row.model)}</td><td class="n">${whole(row.tasks)}</td>
      <td title=${row.figure.why || ""}>${row.of === "reward" ? "reward " : ""}${between(row.figure)}</td><td><${Range} figure=${row.figure} low=${low} high=${high} own=${row.own} /></td>
      ${compared ? html`<${Compared} row=${row} corrected=${corrected} />` : ""}<td class="n">${f(row.length)}</td><td class="n">${share(row.truncated)}</td><td class="n">${share(row.invalid)}</td>
      ${data.means.map((name) => html`<td class="n" title=${row.means[name] ? between(row.means[name]) : ""}>${row.means[name] ? f(row.means[name].mean) : ""}</td>`)}</tr>`)}</tbody></table></div>`;
}

const share = (value) => (value === null || value === undefined ? "–" : percent(value));

function Compared({ row, corrected }) {
  if (!row.difference) return html`<td></td><td></td><td></td><td></td><td></td><td></td>`;
  const { won, lost, tied, p, p_holm: holm, verdict } = row.wins;
  return html`<td class=${row.difference.mean > 0 ? "up" : row.difference.mean < 0 ? "down" : ""} title=${row.difference.why || ""}>${between(row.difference, signed)}</td><td class="n">${whole(won)}</td><td class="n">${whole(lost)}</td><td class="n">${whole(tied)}</td><td class="n">${f(corrected ? holm : p)}</td><td><span class=${`badge ${TONES[verdict] || ""}`}>${verdict || ""}</span></td>`;
}

/** A mean as a point on its 95% interval. */
function Range({ figure, low, high, own }) {
  const x = (value) => 6 + ((value - low) / (high - low)) * (WIDTH - 12);
  return html`<svg width=${WIDTH} height="18" role="img" aria-label=${between(figure)}>${[low, high].map((v) => html`<line x1=${x(v)} x2=${x(v)} y1="1" y2="17" class="axis"></line>`)}
    ${figure.low === null || figure.low === undefined ? "" : html`<line x1=${x(figure.low)} x2=${x(figure.high)} y1="9" y2="9" class="strong"></line>`}<circle cx=${x(figure.mean)} cy="9" r="4.5" class=${own ? "b" : "a"}></circle></svg>`;
}
