// One rollout: its tokens in the colours of any number, tracks of numbers below, all of one token at the side.

import { f, line, readable, seconds, shown, signed, visible, whole } from "./format.js";
import { given, isPreferenceExample, isScored, onTokens, saidOf } from "./items.js";
import { clipped, clipText, firstOf, measured, PUSH, ratios } from "./measures.js";
import { change, exported, go, here, part, to } from "./net.js";
import { listed } from "./rollouts.js";
import { Tokens } from "./tokens.js";
import { Canvas, colour, Empty, Fate, html, Problem, useAnswer, useEffect, useKeys, useMemo, useRef, useState } from "./ui.js";

const TRACKS = 9;
const PUSHED = "the clip should have taken the gradient of its last pass, but the recorded push is that of both passes";

const pushed = (row, at) => (row.pushed || []).includes(at + row.begin);

/** Whether tokens that the policy did not write are trained on. */
const foreign = (row, kind, trained) => Boolean(trained) && onTokens(row.kind) && ["prompt", "observation", "tool"].includes(kind);

export function Rollout({ run, about, words, query }) {
  const [place, index] = words;
  const { data, problem } = useAnswer(words.length === 2 ? `${run}/rollout/${place}/${index}` : null, { begin: query.begin });
  if (words.length !== 2) return html`<${Empty}>No rollout is chosen: open one from <a href=${to(run, "rollouts")}>the rollouts</a>.</${Empty}>`;
  if (problem) return html`<${Problem} text=${problem} />`;
  if (!data) return html`<${Empty}>reading …</${Empty}>`;
  return html`<${OneRollout} key=${`${part(data)}/${data.index}/${data.begin}`} ...${{ run, about, place: part(data), query, row: data }} />`;
}

function OneRollout({ run, about, place, query, row }) {
  const all = useMemo(() => measured(row, about), [row]);
  const clip = useMemo(() => clipped(row, about), [row]);
  const ratio = useMemo(() => ratios(row, about), [row]);
  const first = useMemo(() => Math.max(0, row.isScored.indexOf(1), row.isSampled.indexOf(1)), [row]);
  const [at, setAt] = useState(query.t === undefined ? first : Math.max(0, Math.min(Number(query.t) - row.begin || 0, row.pieces.length - 1)));
  const measure = all.find((m) => m.name === query.c) || firstOf(all, isPreferenceExample(row.kind) ? ["reference", "push", "change"] : ["change", "surprise"]);
  const step = (by) => () => pin(Math.max(0, Math.min(row.pieces.length - 1, at + by)));
  const pin = (token) => {
    setAt(token);
    change({ t: token + row.begin });
  };
  const asked = () => here().words; // what is on the screen may still be the one before
  const jump = (row) => row && go(to(run, "rollout", [part(row), row.index], { c: query.c }));
  const beside = (by) => () => {
    const [name, index] = asked();
    const i = name === place ? row.siblings.findIndex((s) => s.index === Number(index)) : -1;
    if (i >= 0 && row.siblings[i + by]) jump({ ...row.siblings[i + by], step: row.step, held_out: row.held_out });
  };
  const next = (by) => () => {
    const [name, index] = asked();
    const i = listed.run === run ? listed.rows.findIndex((r) => part(r) === name && r.index === Number(index)) : -1;
    if (i >= 0) jump(listed.rows[i + by]);
    else if (Number(index) + by >= 0) go(to(run, "rollout", [name, Number(index) + by], { c: query.c }));
  };
  const colours = Object.fromEntries(all.slice(0, 9).map((m, i) => [String(i + 1), () => change({ c: m.name })]));
  useKeys({
    ...colours, ArrowRight: step(1), ArrowLeft: step(-1), h: beside(-1), l: beside(1), j: next(1), k: next(-1), "0": () => change({ c: "none" }),
    f: () => document.querySelector("a.text-file")?.click(), i: () => document.querySelector(".frame")?.click(),
    g: () => go(to(run, "group", asked())), Backspace: () => go(listed.run === run && listed.address ? listed.address : to(run, "rollouts", [], { step: row.step })),
  });
  const none = query.c === "none" || !measure;
  return html`
    <${Crumbs} ...${{ run, row, place, query }} />
    <div class="row tight gap choices"><span class="soft small">colour</span>${all.map((m, i) => html`<button class=${!none && m.name === measure.name ? "on" : ""} title=${m.about || ""} onClick=${() => change({ c: m.name })}>${i < 9 ? html`<span class="faint">${i + 1}</span> ` : ""}${m.says}</button>`)}
      ${all.length ? html`<button class=${none ? "on" : ""} onClick=${() => change({ c: "none" })}><span class="faint">0</span> none</button>` : ""}<span class="fill"></span>${none ? "" : html`<${Legend} measure=${measure} />`}</div>
    <div class="one"><div class="left">
      <div class="card tokens" tabindex="0" aria-label="tokens">
        <${Pictures} run=${run} names=${row.media} />
        <${Turns} ...${{ run, row, place, at, onAt: setAt, clip }} measure=${none ? null : measure} />
        ${row.end < row.total || row.begin > 0 ? html`<${Window} row=${row} />` : ""}</div>
      <${Tracks} ...${{ row, all, at, pin, clip }} chosen=${none ? "" : measure.name} /></div>
      <div class="side"><${Token} ...${{ row, at, all, ratio, clip, about }} /><${Why} row=${row} run=${run} /><${Steps} row=${row} /><${Services} row=${row} /><${More} row=${row} run=${run} place=${place} /></div></div>`;
}

function Crumbs({ run, row, place, query }) {
  return html`<div class="row tight gap"><a href=${to(run, "rollouts", [], { step: row.step, held: row.held_out ? "1" : "" })}>step ${row.step}${row.held_out ? ", held out" : ""}</a><span class="faint">/</span>
    <a class="mono" href=${to(run, "group", [place, row.index])}>group ${line(row.group)}</a><span class="faint">/</span><b>rollout ${row.index}</b>${row.side ? html`<span class="pill">${line(row.side)}</span>` : ""}
    ${exported ? "" : row.sides.map((s) => html`<a class="pill" href=${to(run, "rollout", [place, s.index], { c: query.c })} title="the same episode as its other side saw it">against ${line(s.side)}</a>`)}
    ${row.siblings.length > 1 ? html`<span class="faint small">its ${isPreferenceExample(row.kind) ? "preference example" : "group"}:</span>` : ""}
    ${(row.siblings.length > 1 ? row.siblings : []).slice(0, 32).map((s) => html`<a class=${`pill ${s.index === row.index ? "on" : ""}`} href=${to(run, "rollout", [place, s.index], { c: query.c })} title=${isPreferenceExample(row.kind) ? `response ${s.member}` : `rollout ${s.index}, advantage ${f(s.advantage)}${s.fate ? `, ${s.fate}` : ""}`}>${isPreferenceExample(row.kind) ? `response ${s.member}` : html`<span class=${s.advantage > 0 ? "up" : s.advantage < 0 ? "down" : "faint"}>${s.advantage > 0 ? "▲" : s.advantage < 0 ? "▼" : "●"}</span> ${s.reward === null ? (s.fate === "invalid" ? "invalid" : "none") : f(s.reward)}`}</a>`)}
    ${saidOf(row).map((s) => html`<span class=${`pill ${s.tone}`}>${s.text}</span>`)}
    ${row.pushed?.length ? html`<span class="pill bad" title=${PUSHED}>pushed though clipped: ${whole(row.pushed.length)} token${row.pushed.length === 1 ? "" : "s"}</span>` : ""}${row.leaks ? html`<span class="pill bad" title="prompts of other tasks do not">prompt contains the answer</span>` : ""}
    <span class="fill"></span><a class="pill" href=${to(run, "step", [place])}>what the step changed</a></div>`;
}

export const Legend = ({ measure }) => html`<span class="legend">${measure.sign ? html`<span>${f(-measure.most)}</span><i class="div"></i><span>${f(measure.most)}</span>` : html`<span>${f(measure.least)}</span><i class="seq"></i><span>${f(measure.most)}</span>`}
  <u style=${{ textDecorationColor: colour("red") }}>clipped</u><span class="faint">context</span></span>`;

/** The token stream by turns, where there are several; tools and observations fold. */
function Turns({ run, row, place, at, onAt, measure, clip }) {
  const turns = row.turns.filter((t) => t.first < row.end && t.first + t.length > row.begin);
  const several = turns.length > 2 || turns.some((t) => t.calls.length || t.role === "tool" || t.role === "observation");
  const both = { row, measure, clip, at, onAt };
  if (!several) return html`<${Tokens} ...${both} />${row.known ? "" : html`<div class="note calm">This run's tokenizer is not here, so its tokens are numbers. The reply:</div><div class="text dense">${visible(row.text)}</div>`}`;
  return turns.map((turn, i) => {
    const begin = Math.max(0, turn.first - row.begin);
    const end = Math.min(row.pieces.length, turn.first + turn.length - row.begin);
    const number = row.turns.indexOf(turn);
    const trained = foreign(row, turn.role, row.spans.some(([kind, start, length, , learned]) => learned && kind === turn.role && start < turn.first + turn.length && start + length > turn.first));
    const took = row.seconds?.turns?.[number];
    return html`<details key=${number} class=${`turn ${turn.role}`} open=${turn.role === "sampled" || turn.length < 300}><summary>${turn.role}${row.transcripts?.length > 1 ? ` · context ${turn.transcript}` : ""} · ${whole(turn.length)} tokens${took ? ` · ${seconds(took)}` : ""}${turn.reward ? ` · step reward ${f(turn.reward)}` : ""}${turn.temperature === null || turn.temperature === undefined ? "" : ` · temperature ${f(turn.temperature)}`}${turn.cut ? ` · ${turn.cut} tokens did not fit` : ""}${trained ? html` · <b class="bad">trained on</b>` : ""}</summary>
      ${turn.length ? html`<${Tokens} ...${both} begin=${begin} end=${Math.max(begin, end)} />` : ""}${turn.length && row.known ? "" : html`<div class="text dense">${readable(turn.text)}</div>`}
      ${turn.calls.map((call) => html`<div class="call">${call.tool ? html`<b class="mono">${visible(call.tool)}</b> <span class="mono untrusted">${visible(call.arguments)}</span>` : html`<b>malformed call</b>`}${call.problem ? html`<div class="bad">${visible(call.problem)}</div>` : ""}</div>`)}
      </details>`;
  });
}

function Window({ row }) {
  const size = row.end - row.begin;
  return html`<div class="row"><span class="soft">tokens ${whole(row.begin)}–${whole(row.end)} of ${whole(row.total)}</span>
    ${row.begin > 0 ? html`<button onClick=${() => change({ begin: Math.max(0, row.begin - size) || "", t: "" })}>earlier</button>` : ""}
    ${row.end < row.total ? html`<button onClick=${() => change({ begin: row.end, t: "" })}>later</button>` : ""}</div>`;
}

/** Tracks of numbers over the tokens that have one; one cursor for all. */
function Tracks({ row, all, at, pin, chosen }) {
  const places = useMemo(() => {
    const found = [];
    for (let i = 0; i < row.pieces.length; i++) if (row.isScored[i] || row.isSampled[i]) found.push(i);
    return found;
  }, [row]);
  const shownTracks = all.filter((m) => !(m.name === "advantage" && !row.n.token_advantage)).slice(0, TRACKS);
  if (!places.length || !shownTracks.length) return "";
  return html`<div class="card tracks">${shownTracks.map((m) => html`<div class="track" key=${m.name}><button class=${m.name === chosen ? "on" : ""} onClick=${() => change({ c: m.name })}>${m.says}</button>
    <${Canvas} draw=${(pen, w, h) => bars(pen, w, h, m, places, at)} deps=${[m, at]} label=${`${m.says} of each token`}
      onClick=${(e) => { const box = e.currentTarget.getBoundingClientRect(); pin(places[Math.min(places.length - 1, Math.floor(((e.clientX - box.left) / box.width) * places.length))]); }} />
    <span class="n">${f(m.values[at])}</span></div>`)}</div>`;
}

function bars(pen, w, h, measure, places, at) {
  const columns = Math.min(places.length, Math.floor(w));
  const wide = w / columns;
  const middle = measure.sign ? h / 2 : h - 1;
  const tall = measure.sign ? h / 2 - 1 : h - 2;
  pen.fillStyle = colour("line");
  pen.fillRect(0, middle, w, 0.5);
  const paint = { up: colour("blue"), down: colour("red"), plain: colour("yellow") };
  let cursor = -1;
  for (let c = 0; c < columns; c++) {
    const from = Math.floor((c * places.length) / columns);
    const end = Math.max(from + 1, Math.floor(((c + 1) * places.length) / columns));
    let value = NaN;
    for (let i = from; i < end; i++) {
      const own = measure.values[places[i]];
      if (Number.isFinite(own) && !(Math.abs(own) <= Math.abs(value))) value = own;
      if (places[i] === at) cursor = c;
    }
    if (!Number.isFinite(value)) continue;
    const size = Math.min(1, Math.abs(value - (measure.sign ? 0 : measure.least)) / (measure.most - (measure.sign ? 0 : measure.least) || 1)) * tall;
    pen.fillStyle = measure.sign ? (value > 0 ? paint.up : paint.down) : paint.plain;
    pen.fillRect(c * wide, measure.sign && value < 0 ? middle : middle - size, Math.max(0.7, wide > 3 ? wide - 1 : wide), size);
  }
  if (cursor >= 0) {
    pen.fillStyle = colour("ink");
    pen.fillRect(cursor * wide + wide / 2 - 0.75, 0, 1.5, h);
  }
}

/** The place of a token among those that are trained on, as rewards of steps count them; "" where the page begins later. */
function learnedPlace(row, at) {
  if (row.begin || !row.isScored[at]) return "";
  let place = 0;
  for (let i = 0; i <= at; i++) place += row.isScored[i];
  return `, ${whole(place)} of ${whole(row.scored)} trained`;
}

function Token({ row, at, all, ratio, clip, about }) {
  const n = (name) => row.n[name]?.[at];
  const has = (value) => value !== undefined && !Number.isNaN(value);
  const old = has(n("before")) ? n("before") : n("engine");
  const [gave, lines] = [given(row.kind), []];
  const add = (name, value, title = "") => lines.push(html`<dt title=${title}>${name}</dt><dd title=${title}>${value}</dd>`);
  if (has(n("engine"))) add("probability, sampled", f(Math.exp(n("engine"))));
  for (const [name, says] of [["engine", "log-prob, engine"], ["before", "log-prob, learner before"], ["learner", "log-prob, at its update"], ["reference", "log-prob, reference"], ["teacher", "log-prob, teacher"]]) if (has(n(name)) && !(gave && name === "before")) add(says, f(n(name), 4));
  if (ratio && has(ratio[at]) && !gave) add("ratio, last update", f(ratio[at], 4));
  const a = all.find((m) => m.name === "advantage")?.values[at];
  if (clip && about.bounds && has(clip[at])) add("clip", html`<span class=${clip[at] ? "down" : ""}>${clipText(ratio[at], a, about.bounds)}</span>`);
  for (const m of all) if (["entropy", "advantage", "kl", "value", "returns"].includes(m.name) && has(m.values[at])) add(m.name === "kl" ? "KL (k3)" : m.says, f(m.values[at]));
  if (has(n("weight"))) add("push on weights", html`${f(n("weight"))}${pushed(row, at) ? html` <span class="bad" title=${PUSHED}>pushed though clipped</span>` : ""}`, PUSH);
  if (has(n("after"))) add("by the step", `${f(Math.exp(old))} → ${f(Math.exp(n("after")))}`);
  if (has(n("kept"))) add("kept by entropy", n("kept") ? "yes" : "no");
  if (has(row.versionAt[at])) add("version of the weights", html`${row.versionAt[at]} <span class="faint">as the engine reports</span>`);
  const kind = (row.spans.find(([, start, length]) => at + row.begin >= start && at + row.begin < start + length) || ["–"])[0];
  return html`<div class="card"><div><b>token ${whole(at + row.begin)}</b> <span class="soft">of ${whole(row.total)}, id ${row.ids[at]}${learnedPlace(row, at)}</span></div>
    <div class="mono untrusted" style=${{ margin: "2px 0 4px" }}>“${line(row.pieces[at])}”</div>
    <dl class="kv" style=${{ margin: 0 }}>${lines}<dt>comes from</dt><dd class=${foreign(row, kind, row.isScored[at]) ? "bad" : ""}>${kind}${row.isScored[at] ? (foreign(row, kind, true) ? ", trained on" : "") : ", not trained on"}</dd></dl></div>`;
}

function Why({ row, run }) {
  const tone = row.fate === null || row.fate === "trained" ? "blue" : "calm";
  const e = row.equation;
  const parts = row.parts || [];
  const changed = [row.shaping ? ["shaping", row.shaping] : null, row.penalty ? ["KL in the reward", -row.penalty] : null].filter(Boolean);
  const advantage = row.advantage;
  const steps = (row.step_rewards || []).reduce((sum, s) => sum + (s.reward || 0), 0);
  const left = row.reward === null ? NaN : row.reward - parts.reduce((s, p) => s + (p.value || 0), 0);
  const adds = Math.abs(left) < 1e-6 || Math.abs(left - steps) < 1e-6;
  const earned = adds && Math.abs(left) >= 1e-6 ? html` + <span class="pill">its steps ${f(steps)}</span>` : "";
  return html`<div class="card"><div class="row tight"><h2>Why?</h2><${Fate} fate=${row.fate} />${row.replayed ? html`<span class="pill">replayed${row.first ? html` from <a href=${to(run, "rollout", [String(row.first.step), row.first.index])}>step ${row.first.step}</a>` : " from an earlier step"}</span>` : ""}</div><div class=${`note ${tone} untrusted`}>${visible(row.why)}</div>
    ${given(row.kind) ? "" : html`<div class="spread"><b>reward ${row.reward === null ? "none" : f(row.reward)}</b>${parts.length ? (adds ? " = " : " with ") : ""}${parts.map((p, i) => html`${i ? (adds ? " + " : " ") : ""}<span class="pill">${visible(p.name)} ${f(p.value)}</span>`)}${earned}</div>`}
    ${adds || !parts.length || given(row.kind) ? "" : html`<div class="soft small">the environment gave the reward itself: it is not the sum of what it named</div>`}
    ${isScored(row.kind) && row.reward !== null ? html`<div class="spread"><b>score ${f(row.reward)}</b>${parts.map((p) => html` <span class="pill">${visible(p.name)} ${f(p.value)}</span>`)}</div>` : ""}
    <${Judged} answers=${row.answers} />
    ${changed.length ? html`<div class="spread">as used ${f(row.used)} = ${f(row.reward)}${changed.map(([name, value]) => html` <span class="pill">${name} ${signed(value)}</span>`)}</div>` : ""}
    ${advantage === null || row.kind === "eval" || given(row.kind) ? "" : html`<div class="spread" style=${{ marginTop: "4px" }}><b>advantage ${f(advantage)}</b>${e.equation && e.sd === 0 && !advantage ? (e.n === 1 ? ": it has no group" : `: all ${e.n} rewards of its group are ${f(e.mean)}`) : e.equation ? html` = ${e.equation.startsWith("(") ? `(${f(e.reward)} − ${f(e.mean)}) / ${f(e.sd)}` : e.equation === "R" ? f(e.reward) : `${f(e.reward)} − ${f(e.equation.endsWith("others") ? (e.mean * e.n - e.reward) / (e.n - 1) : e.mean)}`}` : ""}</div>
      <div class="soft small">${e.equation && e.n > 1 ? `${e.equation}, of ${e.n} replies` : e.formula ? visible(e.formula) : ""}</div>`}
    ${row.step_rewards?.length && !scoredSteps(row).length ? html`<div class="soft small">rewards of steps: ${row.step_rewards.map((s) => `${f(s.reward)} at trained token ${s.at}`).join(", ")}</div>` : ""}</div>`;
}

/** What a reward model made of the steps of a reply, as the run noted it. */
const scoredSteps = (row) => (Array.isArray(row.notes?.scored_steps) ? row.notes.scored_steps : []);

/** The notes of the environment itself. */
function otherNotes(row) {
  if (!scoredSteps(row).length) return row.notes;
  const { scored_steps, ...others } = row.notes;
  return others;
}

/** The steps of a reply, each with the verdict of the reward model, its reward and the advantage of its last token. */
function Steps({ row }) {
  const steps = scoredSteps(row);
  if (!steps.length) return "";
  const ends = row.step_rewards?.length === steps.length && !row.begin && row.n.token_advantage ? row.step_rewards.map((s) => s.at) : null;
  const learned = [];
  if (ends) row.isScored.forEach((is, i) => is && learned.push(i));
  const number = (value) => html`<td class="n">${value === undefined ? "" : f(value)}</td>`;
  const measure = "probability" in steps[0] ? "probability" : "score";
  return html`<div class="card"><h2>Steps</h2><table><thead><tr><th>step</th><th class="n">${measure}</th><th class="n">reward</th>${ends ? html`<th class="n">advantage</th>` : ""}</tr></thead>
    <tbody>${steps.map((s, i) => html`<tr><td class="mono untrusted">${visible(s.text)}</td>${number(s[measure])}${number(s.reward)}${ends ? number(row.n.token_advantage[learned[ends[i] - 1]]) : ""}</tr>`)}</tbody></table></div>`;
}

function More({ row, run, place }) {
  const pairs = [["stop", row.stop], ["tokens", `${given(row.kind) ? `${whole(row.scored)} learned` : `${whole(row.sampled)} sampled`} of ${whole(row.total)}`], ["versions of the weights", (row.versions || []).join(", ")], ["visit", row.epoch === null ? null : row.epoch + 1]];
  if (row.seconds) pairs.push(["turns took", row.seconds.turns.map(seconds).join(" + ")], ["reward took", seconds(row.seconds.reward)]);
  if (row.branch_of !== null && row.branch_of !== undefined) pairs.push(["branched off", `member ${row.branch_of} after ${row.branch_turns} turns`]);
  const data = [["task", isPreferenceExample(row.kind) ? null : row.columns], ["noted", otherNotes(row)]].filter(([, v]) => v && (typeof v !== "object" || Object.keys(v).length));
  return html`<div class="card"><dl class="kv" style=${{ margin: 0 }}><dt>task</dt><dd class="untrusted">${line(row.task || "–")}</dd>${pairs.filter(([, v]) => v).map(([n, v]) => html`<dt>${n}</dt><dd>${v}</dd>`)}</dl>
    ${data.map(([name, value]) => html`<details open><summary class="soft small">${name}</summary><${Data} value=${value} run=${run} /></details>`)}
    ${exported ? "" : html`<div class="small" style=${{ marginTop: "5px" }}><a class="text-file" title="f" href=${`text/${run}/${place}/${row.index}`} download>the reply as a text file</a> <span class="faint">${whole(row.characters)} characters</span></div>`}</div>`;
}

export const Picture = ({ run, name }) => (exported ? html`<${Held} name=${name} />` : html`<${Drawn} name=${name} address=${`picture/${run}/${name.replace(/^sha256:/, "")}`} />`);

const Drawn = ({ name, address }) => html`<img class="thumb" loading="lazy" alt=${`picture ${name.slice(0, 8)}`} src=${address} />`;

/** A picture that an exported file holds, or a word on one that it does not. */
function Held({ name }) {
  const { data } = useAnswer(`picture/${name}`);
  return data?.address ? html`<${Drawn} name=${name} address=${data.address} />` : html`<span class="pill">picture ${name.slice(0, 8)}: not in this file</span>`;
}

const answersOf = (answers) => (Array.isArray(answers) ? answers : []);

/** Whether an answer of a service is a verdict: a number, some numbers by name, or none that is valid. */
function isVerdict({ answer, invalid }) {
  if (invalid !== undefined || typeof answer === "number") return true;
  return answer !== null && typeof answer === "object" && !Array.isArray(answer) && Object.values(answer).every((v) => typeof v === "number");
}

/** Verdicts of judges and reward models on the reply. */
function Judged({ answers }) {
  return answersOf(answers).filter(isVerdict).map(({ service, answer, invalid, said }) => html`<div class="spread"><b class="untrusted">${visible(service || "?")}</b> answered ${invalid !== undefined ? html`<span class="bad untrusted">nothing valid: ${visible(String(invalid))}</span>` : typeof answer === "number" ? f(answer) : Object.entries(answer).map(([n, v]) => html`<span class="pill untrusted">${visible(n)} ${f(v)}</span> `)}<${Said} texts=${said} /></div>`);
}

/** The texts that a verdict was read from. */
function Said({ texts }) {
  if (!Array.isArray(texts) || !texts.length) return "";
  return html`<details class="service" open=${texts.length === 1}><summary class="soft small">${texts.length === 1 ? "in its own words" : `in its own words, ${texts.length} answers`}</summary>${texts.slice(0, 64).map((text) => html`<div class="text dense passage untrusted">${visible(String(text))}</div>`)}</details>`;
}

/** Answers of other services, such as the passages of a retriever; scores of steps are shown beside the steps. */
function Services({ row }) {
  const isOfSteps = ({ answer }) => scoredSteps(row).length && Array.isArray(answer) && answer.every((v) => typeof v === "number");
  const said = answersOf(row.answers).filter((one) => !isVerdict(one) && !isOfSteps(one));
  if (!said.length) return "";
  return html`<div class="card"><h2>Answers of services</h2>${said.map(({ service, answer }) => html`<div class="service"><b class="untrusted">${visible(service || "?")}</b>
    ${(Array.isArray(answer) ? answer.slice(0, 20) : [answer]).map((one) => html`<div class="text dense passage">${typeof one?.contents === "string" ? visible(`${one.score === undefined ? "" : `${f(one.score)}  `}${one.contents}`) : shown(one)}</div>`)}</div>`)}</div>`;
}

/** A picture over the page, until Escape, Enter or a click. */
function Large({ run, name, close }) {
  const place = useRef();
  useEffect(() => place.current.focus(), []);
  useKeys({ Escape: close });
  return html`<div class="veil" onClick=${(e) => { e.stopPropagation(); close(); }}><button class="frame large" ref=${place} aria-label="close the picture"><${Picture} run=${run} name=${name} /></button></div>`;
}

/** The pictures of a prompt; each opens larger. */
export function Pictures({ run, names }) {
  const [open, setOpen] = useState(null);
  if (!names?.length) return "";
  return html`<div class="row tight pictures">${names.map((m) => html`<button class="frame" onClick=${(e) => { e.stopPropagation(); setOpen(m); }} aria-label=${`picture ${m.slice(0, 8)}, larger`}><${Picture} run=${run} name=${m} /></button>`)}
    ${open ? html`<${Large} run=${run} name=${open} close=${() => setOpen(null)} />` : ""}</div>`;
}

function Data({ value }) {
  if (typeof value !== "object" || Array.isArray(value)) return html`<div class="mono untrusted small">${shown(value)}</div>`;
  return html`<dl class="kv" style=${{ margin: 0 }}>${Object.entries(value).map(([n, v]) => html`<dt class="untrusted">${visible(n)}</dt><dd class="untrusted mono small">${shown(v)}</dd>`)}</dl>`;
}
