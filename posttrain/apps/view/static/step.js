// The effect of a step: the tokens that changed most, one by one and by entry of the vocabulary.

import { f, line, whole } from "./format.js";
import { saidOf } from "./items.js";
import { change, go, to } from "./net.js";
import { Empty, html, Problem, useAnswer, useKeys } from "./ui.js";

export function Step({ run, about, words, query }) {
  const latest = useAnswer(words.length ? null : `${run}/overview`, {}, about.stamp[0]);
  const last = latest.data?.parts.filter((p) => !p.endsWith("e")).at(-1);
  if (!words.length && last) go(to(run, "step", [last]), true);
  const { data, problem, waiting } = useAnswer(words.length ? `${run}/step/${words[0]}` : null, { by: query.by });
  const steps = data?.steps || [];
  const at = steps.indexOf(parseInt(words[0], 10)); // what is shown may still be the one before
  const open = (i) => steps[i] !== undefined && go(to(run, "step", [`${steps[i]}${data.held_out ? "e" : ""}`], query), true);
  const measures = data?.measures || [];
  useKeys({
    "[": () => open(at - 1), "]": () => open(at + 1), k: () => open(at - 1), j: () => open(at + 1), r: () => data && go(to(run, "rollouts", [], { step: steps[at] ?? data.step })),
    ...Object.fromEntries(measures.map((m, i) => [String(i + 1), () => m.missing || change({ by: m.name })])),
  });
  if (problem) return html`<${Problem} text=${problem} />`;
  if (!data) return html`<${Empty}>${words.length || latest.data?.parts.length !== 0 ? "reading …" : "This run has no rollouts."}</${Empty}>`;
  return html`
    <div class="row tight gap choices"><h2>What did step</h2><button disabled=${at <= 0} onClick=${() => open(at - 1)} aria-label="the step before">◂</button>
      <input style=${{ width: "64px" }} key=${data.step} defaultValue=${data.step} onChange=${(e) => go(to(run, "step", [e.target.value.trim() || "1"], query))} aria-label="step" /><button disabled=${at >= steps.length - 1} onClick=${() => open(at + 1)} aria-label="the next step">▸</button><h2>do?</h2>
      ${measures.map((m, i) => html`<button class=${m.name === data.by ? "on" : ""} disabled=${m.missing !== ""} title=${m.missing || m.about} onClick=${() => change({ by: m.name })}><span class="faint">${i + 1}</span> ${m.says}</button>`)}
      <span class="fill"></span><a href=${to(run, "rollouts", [], { step: data.step })}>its rollouts</a></div>
    ${data.by ? html`<${Changes} ...${{ run, data, waiting }} />` : html`<${Empty}>Of this step only tokens and the engine's log-probabilities were recorded. <span class="mono">--record full</span> keeps what the learner computed, <span class="mono">--record-after</span> what the step changed.</${Empty}>`}`;
}

function Changes({ run, data, waiting }) {
  const most = Math.max(...data.histogram.counts, 1);
  const measure = data.measures.find((m) => m.name === data.by);
  const push = data.by === "push";
  return html`<div class=${waiting}>
    <div class="card gap row"><div><b>${measure.says}</b><div class="soft small">${whole(data.n)} tokens, mean size ${f(data.size)}, mean ${f(data.mean)}</div>${data.sides.length ? html`<div class="small">${data.sides.map((s, i) => html`${i ? " · " : ""}<b class=${s.name === "chosen" ? "up" : "down"}>${s.name}</b> ${f(s.mean)} on average over ${whole(s.n)}`)}</div>` : ""}<div class="soft small">${measure.about}</div>${data.pushed?.length ? html`<div class="bad">${whole(data.pushed.length)} token${data.pushed.length === 1 ? "" : "s"} pushed though clipped: ${data.pushed.slice(0, 6).map(([index, at], i) => html`${i ? " · " : ""}<a href=${to(run, "rollout", [data.step, index], { t: at, c: "push" })}>rollout ${index}, token ${at}</a>`)}</div>` : ""}</div><span class="fill"></span>
      <svg width="330" height="56" role="img" aria-label="histogram of the changes">${data.histogram.counts.map((n, i) => {
        const tall = n ? 2 + (36 * Math.log1p(n)) / Math.log1p(most) : 0;
        return html`<rect x=${i * 8} y=${40 - tall} width="7" height=${tall} class=${i < 20 ? "hist-down" : i > 20 ? "hist-up" : "hist-zero"}><title>${`${f(data.histogram.low + i * data.histogram.width)}: ${whole(n)} tokens`}</title></rect>`;
      })}<text x="0" y="53">${f(data.histogram.low)}</text><text x="164" y="53" text-anchor="middle">0</text><text x="328" y="53" text-anchor="end">${f(-data.histogram.low)}</text></svg></div>
    <div class="two-columns gap"><${Listed} title=${push ? "pushed up" : "more likely"} rows=${data.up} tone="up" run=${run} data=${data} /><${Listed} title=${push ? "pushed down" : "less likely"} rows=${data.down} tone="down" run=${run} data=${data} /></div>
    <div class="two-columns"><${Entries} title="by entry of the vocabulary: up" rows=${data.vocabulary.up} tone="up" /><${Entries} title="by entry of the vocabulary: down" rows=${data.vocabulary.down} tone="down" /></div></div>`;
}

function Listed({ title, rows, tone, run, data }) {
  const p = (x) => (x.logp === undefined ? "" : `${f(Math.exp(x.logp - x.value), 2)} → ${f(Math.exp(x.logp), 2)}`);
  return html`<div class="card list"><table><thead><tr><th class="n">${title}</th><th class="n">probability</th><th class=${data.preferences ? "" : "n"}>${data.preferences ? "response" : "A"}</th><th>token, after what came before</th></tr></thead>
    <tbody>${rows.slice(0, 14).map((x) => html`<tr class="r" onClick=${() => go(to(run, "rollout", [`${data.step}${data.held_out ? "e" : ""}`, x.index], { t: x.at, c: { after: "change", learner: "ratio" }[data.by] || data.by }))}>
      <td class=${`n ${tone}`}>${f(x.value)}</td><td class="n">${p(x)}</td>${data.preferences ? html`<td>${saidOf(x).map((s) => html`<span class=${s.tone}>${s.text}</span> `)}</td>` : html`<td class=${`n ${x.advantage > 0 ? "up" : x.advantage < 0 ? "down" : "faint"}`}>${f(x.advantage, 2)}</td>`}
      <td class="mono untrusted wide" dir="ltr"><span class="soft">…${line(x.before).slice(-34)}</span><b class="t p3">${line(x.piece)}</b>${x.times > 1 ? html` <span class="faint" title="as often after the same text: the greatest of their changes is shown">× ${whole(x.times)}</span>` : ""}</td></tr>`)}</tbody></table>${rows.length ? "" : html`<div class="empty">none</div>`}</div>`;
}

function Entries({ title, rows, tone }) {
  return html`<div class="card list"><table><thead><tr><th>${title}</th><th class="n">times</th><th class="n">sum</th><th class="n">mean</th></tr></thead>
    <tbody>${rows.slice(0, 14).map((v) => html`<tr><td class="mono untrusted wide" dir="ltr">“${line(v.piece)}” <span class="faint">${v.id}</span></td><td class="n">${whole(v.n)}</td><td class=${`n ${tone}`}>${f(v.sum)}</td><td class="n">${f(v.sum / v.n)}</td></tr>`)}</tbody></table></div>`;
}
