// The overview: four questions, each answered in words with three curves; what was found and decided beside them.

import { Chart } from "./chart.js";
import { f, shown, visible, whole } from "./format.js";
import { given, isPreferenceExample } from "./items.js";
import { exported, go, to } from "./net.js";
import { Empty, html, Problem, useAnswer, useMemo, useState } from "./ui.js";

const nearest = (steps, step) => steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a), steps[0]);

export function Overview({ run, about }) {
  const { data, problem } = useAnswer(`${run}/overview`, {}, JSON.stringify(about.stamp));
  const [all, setAll] = useState(false);
  const events = useMemo(() => (data ? eventsOf(data) : []), [data]);
  if (problem) return html`<${Problem} text=${problem} />`;
  if (!data) return html`<${Empty}>reading the run …</${Empty}>`;
  const steps = [...new Set(data.parts.map((p) => parseInt(p, 10)))];
  const tall = innerHeight < 800 ? 76 : 108;
  const open = (step) => steps.length && go(to(run, "rollouts", [], { step: nearest(steps, step) }));
  return html`
    <div class="about"><${About} data=${data} /><${Health} data=${data} run=${run} steps=${steps} /></div>
    ${data.questions.map((q) => html`<section class="question" key=${q.name}>
      <div><h2>${q.name}</h2><span class=${`badge ${q.tone}`}>${q.word}</span><div class="answer">${q.text}</div></div>
      ${q.panels.map((panel) => html`<${Chart} key=${panel.title} panel=${panel} events=${events} onStep=${open} height=${tall} />`)}
    </section>`)}
    ${data.others.length ? html`<button onClick=${() => setAll(!all)} aria-expanded=${all}>${all ? "hide" : "show"} the other ${data.others.length} metrics</button>` : ""}
    ${all ? html`<div class="others">${data.others.map((panel) => html`<${Chart} key=${panel.title} panel=${panel} events=${events} onStep=${open} height=${84} />`)}</div>` : ""}`;
}

function eventsOf(data) {
  return [
    ...data.checkpoints.map((step) => ({ step, colour: "faint" })),
    ...data.resumes.map((step) => ({ step, colour: "pink" })),
    ...data.health.map((h) => ({ step: h.step, colour: "yellow" })),
  ];
}

function About({ data }) {
  const last = data.steps.at(-1);
  return html`<div class="card">
    <div class="row tight"><h2>${visible(data.name)}</h2><span class="pill">${data.verb}</span><span class="pill">seed ${String(data.seed)}</span>
      ${data.git ? html`<span class="pill">git ${data.git.slice(0, 8)}</span>` : ""}<span class="pill">step ${whole(last)}</span>
      ${data.rollouts ? html`<span class="pill">${given(data.verb) ? `${whole(data.rollouts)} ${isPreferenceExample(data.verb) ? "responses" : "demonstrations"} recorded` : `${whole(data.rollouts)} rollouts, ${whole(data.tokens)} sampled tokens`}</span>` : ""}
      <span class="pill">${data.end ? "ended" : data.on ? "on" : data.checkpoints.length ? "cut off: --resume goes on" : "cut off"}</span></div>
    <div class="formula mono untrusted">${data.objective.slice(0, 2).map((l) => visible(l.trim())).join("\n")}</div>
    ${data.objective.length > 2 ? html`<details><summary class="soft small">the whole formula</summary><div class="formula mono">${data.objective.slice(2).map((l) => visible(l.trim())).join("\n")}</div></details>` : ""}
    <div class="soft small">${data.sizes.slice(-1).map(visible)}</div>
    <div class="timeline short">${data.options.slice(0, 24).map((o) => html`<span class="pill" title=${`${o.name} = ${shown(o.value)}`}>${o.name} ${shown(o.value)}</span>`)}</div></div>`;
}

function Health({ data, run, steps }) {
  return html`<div class="card"><div class="row tight"><h2>Health</h2><span class="soft small">${data.health.length || "no"} finding${data.health.length === 1 ? "" : "s"}</span>
      <span class="small"><span class="key dash c-yellow">finding</span><span class="key dash c-faint">checkpoint</span>${data.resumes.length ? html`<span class="key dash c-pink">resumed</span>` : ""}</span></div>
    ${data.health.slice(-4).map((h) => {
      const [first, second] = visible(h.message).split("\n");
      return html`<div class="note"><a href=${to(run, "rollouts", [], { step: steps.length ? nearest(steps, h.step) : "" })}>step ${h.step} · ${h.name}</a> ${first}<div class="soft small">${second}</div></div>`;
    })}
    ${data.health.length ? "" : html`<div class="soft small">entropy, length, KL, signal, leaps, drops and memory stayed within their limits; whether engine and learner agree is answered under “Is it stable?”</div>`}
    ${given(data.verb) ? "" : html`<${Fates} fates=${data.fates} />`}<${Origins} data=${data} />
    <div class="soft small">${exported ? "" : "A click on a step opens its rollouts."} <kbd>?</kbd> lists the keys.</div></div>`;
}

/** The origins of the trained tokens: those that are not meant for training in red. */
function Origins({ data }) {
  const counts = Object.entries(data.origins);
  if (!counts.length) return "";
  const where = `in ${data.looked} step${data.looked === 1 ? "" : "s"} of the run`;
  return html`<div class="timeline"><span class="soft small" title=${where}>trained on tokens</span>${counts.sort((a, b) => b[1] - a[1]).map(([kind, n]) => html`<span class=${`pill ${data.foreign.includes(kind) ? "bad" : ""}`} title=${where}>${kind} ${whole(n)}</span>`)}
    ${data.pushed ? html`<span class="pill bad" title=${where}>pushed though clipped ${whole(data.pushed)}</span>` : ""}</div>`;
}

function Fates({ fates }) {
  const counts = Object.entries(fates).map(([name, values]) => [name, values.reduce((a, b) => a + b, 0)]);
  const total = counts.reduce((sum, [, n]) => sum + n, 0);
  if (!total) return "";
  return html`<div class="timeline"><span class="soft small">rollouts were</span>${counts.sort((a, b) => b[1] - a[1]).map(([name, n]) => html`<span class="pill">${name} ${f((100 * n) / total)}%</span>`)}</div>`;
}
