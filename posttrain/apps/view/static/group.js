// All replies to a prompt side by side, and the same prompt at its other visits; the responses of a preference example likewise.

import { f, line, readable, shown, visible, whole } from "./format.js";
import { isPreferenceExample, isScored, saidOf, scoreOf } from "./items.js";
import { clipped, firstOf, measured } from "./measures.js";
import { change, go, part, to } from "./net.js";
import { Legend, Pictures } from "./rollout.js";
import { Tokens } from "./tokens.js";
import { Empty, Fate, html, Problem, useAnswer, useKeys, useMemo, useState } from "./ui.js";

export function Group({ run, about, words, query }) {
  const { data, problem } = useAnswer(words.length === 2 ? `${run}/group/${words[0]}/${words[1]}` : null);
  if (words.length !== 2) return html`<${Empty}>No group is chosen: open one from <a href=${to(run, "rollouts", [], { as: "groups" })}>the groups</a>.</${Empty}>`;
  if (problem) return html`<${Problem} text=${problem} />`;
  if (!data) return html`<${Empty}>reading …</${Empty}>`;
  return html`<${Replies} key=${`${part(data.group)}/${data.group.first}`} ...${{ run, about, data, words, query }} />`;
}

function Replies({ run, about, data, words, query }) {
  const { group, visits } = data;
  const order = query.order || "reward";
  const rows = useMemo(() => sorted(data.rollouts, order), [data, order]);
  const all = useMemo(() => rows.map((row) => measured(row, about)), [rows]);
  const names = [...new Map(all.flat().map((m) => [m.name, m])).values()];
  const example = isPreferenceExample(group.kind);
  const name = query.c || firstOf(all.flat(), example ? ["reference", "push"] : ["change", "push", "surprise"])?.name;
  const most = Math.max(...all.flat().filter((m) => m.name === name).map((m) => m.most), 1e-9);
  const [at, setAt] = useState(0);
  const home = part(group);
  const shownNow = visits.findIndex((v) => part(v) === home && v.index === group.first);
  const named = visits.findIndex((v) => part(v) === words[0] && v.index === Number(words[1])); // what is shown may still be the one before
  const near = named >= 0 ? named : shownNow;
  const visit = (by) => () => visits[near + by] && go(to(run, "group", [part(visits[near + by]), visits[near + by].index], { c: query.c }));
  useKeys({
    ...Object.fromEntries(names.slice(0, 9).map((m, i) => [String(i + 1), () => change({ c: m.name })])), "0": () => change({ c: "none" }),
    l: () => setAt(Math.min(rows.length - 1, at + 1)), h: () => setAt(Math.max(0, at - 1)), ArrowRight: () => setAt(Math.min(rows.length - 1, at + 1)), ArrowLeft: () => setAt(Math.max(0, at - 1)),
    j: visit(1), k: visit(-1), Enter: () => go(to(run, "rollout", [home, rows[at].index], { c: query.c })),
    i: () => document.querySelector(".frame")?.click(),
    o: () => change({ order: order === "reward" ? "index" : "reward" }),
  });
  const prompt = rows[0]?.prompt || "";
  const sums = example && rows.length === 2 ? rows.map((row, i) => [saidOf(row)[0]?.tone, scoreOf(all[i])]) : [];
  const [won, lost] = ["up", "down"].map((tone) => sums.find(([own, sum]) => own === tone && sum !== null)?.[1]);
  const margin = won === undefined || lost === undefined ? null : won - lost;
  return html`
    <div class="row tight gap"><a href=${to(run, "rollouts", [], { step: group.step, held: group.held_out ? "1" : "" })}>step ${group.step}${group.held_out ? ", held out" : ""}</a><span class="faint">/</span><b class="mono">${example ? "preference example" : "group"} ${line(group.group)}</b>
      ${group.side ? html`<span class="pill">${line(group.side)}</span>` : ""}${example || group.mean === null ? "" : html`<span class="pill">mean ${f(group.mean)}</span><span class="pill">spread ${f(group.sd)}</span>
      ${group.right_n !== undefined ? html`<span class=${`pill`}>${group.right_n} of ${group.n} right</span>` : ""}`}${example || group.n === 1 ? "" : html`<span class="pill">${group.replies} distinct of ${group.n}</span>`}${data.hidden > 0 ? html`<span class="pill">${data.hidden} not shown</span>` : ""}
      ${example && margin !== null ? html`<span class="pill" title="the log-probability less the reference's, summed over the response: of the chosen one less that of the rejected one">margin ${f(margin)}</span>` : ""}
      <span class="fill"></span>${group.mean === null ? "" : html`<button onClick=${() => change({ order: order === "reward" ? "index" : "reward" })}>order: ${order !== "reward" ? (example ? "as given" : "as sampled") : example ? "by score" : "by reward"}</button>`}</div>
    <div class="card gap"><div class="text dense untrusted" style=${{ maxHeight: "120px", overflow: "auto" }}>${readable(prompt)}</div>${example ? "" : html`<${Task} columns=${rows[0]?.columns} />`}
      <${Pictures} run=${run} names=${rows[0]?.media} /></div>
    ${visits.length > 1 ? html`<${Visits} ...${{ run, visits, near, query, example }} />` : ""}
    ${names.length ? "" : html`<div class="soft small gap">${isScored(group.kind) ? "A reward model scores whole responses, at the update that learned from them: there are no numbers of tokens." : "No numbers of these tokens were recorded."}</div>`}
    <div class="row tight gap choices" hidden=${!names.length}><span class="soft small">colour</span>${names.map((m, i) => html`<button class=${m.name === name ? "on" : ""} title=${m.about || ""} onClick=${() => change({ c: m.name })}>${i < 9 ? html`<span class="faint">${i + 1}</span> ` : ""}${m.says}</button>`)}<button class=${name === "none" ? "on" : ""} onClick=${() => change({ c: "none" })}><span class="faint">0</span> none</button><span class="fill"></span>
      ${names.some((m) => m.name === name) ? html`<${Legend} measure=${{ ...names.find((m) => m.name === name), most }} />` : ""}</div>
    <div class=${`replies ${rows.length === 2 ? "two" : ""}`}>${rows.map((row, i) => {
      const own = all[i].find((m) => m.name === name);
      return html`<${Reply} key=${row.index} ...${{ row, example, score: example ? scoreOf(all[i]) : null, chosen: i === at, measure: own ? { ...own, most } : null, clip: clipped(row, about), open: () => go(to(run, "rollout", [home, row.index], { c: query.c })) }} />`;
    })}</div>`;
}

const sorted = (rows, order) => (order === "reward" ? [...rows].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.index - b.index) : rows);

function Task({ columns }) {
  if (!columns || typeof columns !== "object") return "";
  const own = Object.entries(columns).filter(([name]) => name !== "prompt");
  return own.length ? html`<div class="row tight">${own.slice(0, 8).map(([name, value]) => html`<span class="pill untrusted">${visible(name)} ${shown(value).slice(0, 120)}</span>`)}</div>` : "";
}

function Visits({ run, visits, near, query, example }) {
  const means = visits.map((v) => v.mean).filter((v) => v !== null);
  const low = Math.min(0, ...means);
  const high = Math.max(...means, 0, low + 1e-9);
  return html`<div class="card gap"><div class="row tight"><h3>its visits</h3><span class="soft small">${example ? "" : "mean reward at each; "}<kbd>j</kbd> <kbd>k</kbd> walk through them</span></div>
    <div class="visits" style=${example ? { height: "20px" } : {}}>${visits.map((v, i) => html`<a class=${`visit ${i === near ? "on" : ""}`} href=${to(run, "group", [part(v), v.index], { c: query.c })} title=${example ? `step ${v.step}` : `step ${v.step}: mean ${f(v.mean)}, ${v.right_n} of ${v.n} right, ${v.replies} distinct replies`}><span style=${{ height: `${v.mean === null ? 0 : (38 * (v.mean - low)) / (high - low)}px` }}></span>${v.step}</a>`)}</div></div>`;
}

function Reply({ row, example, score, chosen, measure, clip, open }) {
  const first = Math.max(0, Math.min(...[row.isScored.indexOf(1), row.isSampled.indexOf(1)].filter((i) => i >= 0), row.pieces.length));
  const begin = first === row.pieces.length ? 0 : first;
  const said = saidOf(row);
  return html`<div class=${`card reply ${chosen ? "sel" : ""}`} onClick=${(e) => (getSelection().isCollapsed ? open(e) : 0)}>
    <div class="reply-head"><span class="row"><b>${example ? "response " : "#"}${example ? row.member : row.index}</b>${said.map((s) => html`<b class=${s.tone}>${s.text}</b>`)}${score === null ? "" : html`<span title="log-probabilities less the reference's, summed over its tokens">${f(score)}</span>`}${row.reward !== null ? html`<span>${example ? "score" : "reward"} <b>${f(row.reward)}</b></span>` : row.invalid ? html`<span class="bad">invalid</span>` : ""}</span>
      ${row.advantage !== null && !example ? html`<span class=${row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : "faint"}>A ${f(row.advantage)}</span>` : ""}<span class="soft">${whole(row.length)} tokens · ${row.stop || ""} <${Fate} fate=${row.fate === "trained" ? "" : row.fate} /></span></div>
    <div class="part-pills">${(row.parts || []).map((p) => html`<span class=${`pill ${p.value > 0 ? "on" : ""}`}>${visible(p.name)} ${f(p.value)}</span>`)}${row.replayed ? html`<span class="pill">replayed</span>` : ""}${judged(row)}</div>
    ${row.known && row.pieces.length ? html`<${Tokens} dense ...${{ row, begin, measure, clip }} />` : html`<div class="text dense">${visible(row.text)}</div>`}</div>`;
}

/** Answers of judges and other services on a reply, where they are numbers. */
function judged(row) {
  const named = new Set((row.parts || []).map((p) => p.name));
  return (Array.isArray(row.answers) ? row.answers : []).flatMap(({ service, answer, invalid }) => {
    if (invalid !== undefined) return [html`<span class="pill bad untrusted">${visible(service)}: ${visible(String(invalid))}</span>`];
    const value = typeof answer === "number" ? answer : answer?.reward;
    return typeof value === "number" && !named.has(service) ? [html`<span class="pill untrusted">${visible(service)} ${f(value)}</span>`] : [];
  });
}
