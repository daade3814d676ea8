// All rollouts: filters, histograms that select, ready questions, one SELECT.

import { Histogram } from "./chart.js";
import { f, inShell, line, outcome, percent, visible, whole } from "./format.js";
import { given, isScored } from "./items.js";
import { change, exported, go, here, part, to } from "./net.js";
import { Fate, html, Problem, Signed, useAnswer, useEffect, useKeys, useLayoutEffect, useMemo, useRef, useState } from "./ui.js";

const OWN = ["sort", "as", "sel", "offset"]; // what is no filter

/** Whether a row is of a group: while an answer is waited for, rows of the other kind may still be there. */
const isGroup = (row) => row.matched !== undefined;

/** The rows that were listed last, for pages that walk through them. */
export const listed = { rows: [], run: -1, address: "" };

const COLUMNS = [
  ["step", "step", "n"], ["index", "#", "n"], ["group", "group", ""], ["prompt", "prompt", "text"], ["text", "reply", "text"], ["reward", "reward", "n"],
  ["advantage", "advantage", "n"], ["sd", "spread", "n"], ["length", "length", "n"], ["stop", "stop", ""], ["fate", "fate", ""],
];
const ROW = 25; // pixels: see td in app.css
const EARNED = ["reward", "advantage", "sd", "right", "mean"]; // columns of sampled rollouts
const ALWAYS = ["longest", "cut"]; // questions that anything answers
const RIGHT = ["wrong", "once", "lost"]; // questions that ask what is right
const GROUPS = [
  ["step", "step", "n"], ["group", "group", ""], ["prompt", "prompt", "text"], ["text", "commonest reply", "text"], ["right", "right", "n"], ["mean", "mean reward", "n"],
  ["sd", "spread", "n"], ["replies", "distinct", "n"], ["length", "length", "n"], ["epoch", "visit", "n"],
];

function useLater(value, wait) {
  const [later, set] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => set(value), wait);
    return () => clearTimeout(timer);
  }, [value]);
  return later;
}

export function Rollouts({ run, about, questions, query }) {
  const filters = Object.fromEntries(Object.entries(query).filter(([name]) => !OWN.includes(name)));
  const groups = query.as === "groups";
  const offset = Number(query.offset || 0);
  const version = about.stamp[0];
  const { data, problem, waiting, of } = useAnswer(`${run}/rollouts`, { ...filters, sort: query.sort, as: query.as, offset }, version);
  const parts = about.parts.slice(0, 4);
  const played = !given(about.verb);
  const scored = isScored(about.verb); // a response has a score, in the place of a reward
  const columns = (groups ? GROUPS : [...COLUMNS.slice(0, 6), ...parts.map((p) => [`part.${p}`, p, "n"]), ...COLUMNS.slice(6)])
    .filter(([name]) => played || !EARNED.includes(name) || (scored && name === "reward")).map((column) => (scored && column[0] === "reward" ? ["reward", "score", "n"] : column));
  const names = ["reward", "advantage", "length", ...parts.map((p) => `part.${p}`)];
  const later = useLater(JSON.stringify(filters), 60);
  const histograms = useAnswer(`${run}/histograms`, { ...JSON.parse(later), of: names.join(",") }, version);
  const asked = Object.keys(JSON.parse(later)).some((name) => name !== "held");
  const means = useAnswer(asked ? `${run}/means` : null, JSON.parse(later), version);
  const search = useRef();
  const rows = data?.rows || [];
  const at = data ? Math.min(Number(query.sel || 0), Math.max(0, rows.length - 1)) : Number(query.sel || 0);
  const select = (place) => change({ sel: Math.max(0, data ? Math.min(rows.length - 1, place) : place) });
  const open = (row, page) => row && go(to(run, page || (isGroup(row) ? "group" : "rollout"), [part(row), isGroup(row) ? row.first : row.index], row.at === undefined || row.at === null ? {} : { t: row.at }));
  useKeys({
    j: () => select(at + 1), k: () => select(at - 1), ArrowDown: () => select(at + 1), ArrowUp: () => select(at - 1),
    Enter: () => open(rows[at]), g: () => open(rows[at], "group"),
    "/": () => search.current?.focus(),
    n: () => data && offset + rows.length < data.count && change({ offset: offset + rows.length, sel: 0 }),
    p: () => offset && change({ offset: Math.max(0, offset - 100), sel: 0 }),
    a: () => exported || change({ as: groups ? "" : "groups", sort: "", offset: "", sel: "" }),
    "[": () => change({ step: Math.max(0, (parseInt(query.step, 10) || 1) - 1), offset: "" }),
    "]": () => change({ step: (parseInt(query.step, 10) || 0) + 1, offset: "" }),
    x: () => go(to(run, "rollouts", [], {}), true),
  });
  useLayoutEffect(() => {
    if (rows.length && !isGroup(rows[0])) Object.assign(listed, { rows, run, address: location.hash });
  });
  useEffect(() => {
    document.querySelector("tr.sel")?.scrollIntoView({ block: "nearest" });
  }, [at]);
  const most = Math.max(...rows.map((r) => Math.abs(r.advantage || 0)), 0.01);
  const [all, setAll] = useState(null); // the answer that was scrolled: only then are rows drawn that cannot be seen yet
  const drawn = all === data ? rows.length : Math.min(rows.length, Math.max(Math.ceil(innerHeight / ROW), at + 9));
  const body = useMemo(() => rows.slice(0, drawn).map((row, i) => html`<tr class=${`r${i === at ? " sel" : ""}`} key=${`${part(row)}/${isGroup(row) ? row.first : row.index}`} onClick=${() => open(row)}>
        ${isGroup(row) ? html`<${GroupCells} ...${{ row, played }} />` : html`<${Cells} ...${{ row, run, parts, most, played, scored, success: about.success }} />`}</tr>`), [data, at, about.success, drawn]); // not drawn again when a histogram arrives
  const set = (changes) => change({ ...changes, offset: "", sel: "" });
  return html`
    <${Bar} ...${{ about, query, filters, set, search, questions, groups }} count=${data?.count} refused=${problem ? (/token/.test(problem) || !query.where ? "token" : "where") : ""} />
    ${problem ? html`<${Problem} text=${problem} />` : ""}
    <div class="hists">${names.map((name) => histograms.data?.[name] && (histograms.data[name].count || query[name]) ? html`<${Histogram} key=${name} data=${histograms.data[name]} label=${scored && name === "reward" ? "score" : scored ? name.replace(/^part\./, "") : name.replace(/^part\./, "part: ")} chosen=${query[name]} choose=${(range) => set({ [name]: range })} />` : "")}
      <${Facets} data=${histograms.data} query=${query} set=${set} /></div>
    ${asked && !problem && means.data?.these ? html`<${Beside} data=${means.data} parts=${parts} />` : ""}
    <div class=${`card list long ${waiting}`} data-of=${of} onScroll=${() => drawn < rows.length && setAll(data)}><table style=${{ marginBottom: `${(rows.length - drawn) * ROW}px` }}>
      <thead><tr>${columns.map(([name, says, kind]) => html`<${Head} ...${{ name, says, kind, sort: query.sort || "", set }} />`)}</tr></thead>
      <tbody>${body}</tbody></table>
      ${data && !rows.length ? html`<div class="empty">${Object.keys(filters).length ? html`Nothing fits. <kbd>x</kbd> takes all filters away.` : "There are none yet."}</div>` : ""}</div>
    <div class="row" style=${{ marginTop: "8px" }}>
      ${data?.note ? html`<span class="warn small">${data.note}</span>` : ""}
      <span class="soft">${data ? `${whole(offset + (rows.length ? 1 : 0))}–${whole(offset + rows.length)} of ${whole(data.count)}` : ""}</span>
      <button disabled=${!offset} onClick=${() => change({ offset: Math.max(0, offset - 100), sel: 0 })}>previous</button>
      <button disabled=${!data || offset + rows.length >= data.count} onClick=${() => change({ offset: offset + rows.length, sel: 0 })}>next</button>
      ${exported || !data ? "" : html`<span class="sql mono grow untrusted" title="the same question in the terminal">posttrain query ${inShell(visible(about.folder))} ${inShell(visible(data.sql))}</span>`}
      ${exported ? "" : html`<a class="export" title="e" href=${`export/${run}?${new URLSearchParams(filters)}`} download>export these</a>`}</div>`;
}

function Bar({ about, query, filters, set, search, questions, groups, count, refused }) {
  const asked = questions.find((q) => q.name === query.ask);
  const chips = Object.entries(filters).filter(([name]) => !["q", "ask", "where", "token", "step", "held"].includes(name));
  return html`<div class="row gap">
      <div class="row tight"><button class=${groups ? "" : "on"} onClick=${() => set({ as: "", sort: "" })}>rollouts</button>${exported ? "" : html`<button class=${groups ? "on" : ""} onClick=${() => set({ as: "groups", sort: "" })}>groups</button><button class=${query.held === "1" ? "on" : ""} onClick=${() => set({ held: query.held === "1" ? "" : "1", step: "" })} title="those of the evaluations during training">held out</button>`}</div>
      <input class="search" ref=${search} type="search" title=${visible(about.unsearched || "")} placeholder=${!about.searchable && !exported ? "search: texts are being read" : about.unsearched ? "search beginnings ( / )" : "search texts ( / )"} value=${query.q || ""} onInput=${(e) => set({ q: e.target.value })} aria-label="search prompts and replies" />
      <input style=${{ width: "96px" }} placeholder="steps 1..20" key=${`step ${query.step || ""}`} defaultValue=${query.step || ""} onChange=${(e) => set({ step: e.target.value.trim() })} aria-label="steps" />
      ${exported ? "" : html`<input class=${`condition mono ${refused === "where" ? "refused" : ""}`} aria-invalid=${refused === "where"} key=${`where ${query.where || ""}`} defaultValue=${query.where || ""} placeholder=${`where … in SQL: length > 40${!given(about.verb) ? ` and ${about.parts[0] || "mean"} < 1` : ""}`} onChange=${(e) => set({ where: e.target.value })} aria-label="condition in SQL" />`}
      ${exported ? "" : html`<input class=${`condition token mono ${refused === "token" ? "refused" : ""}`} aria-invalid=${refused === "token"} placeholder="any token … ratio > 2" key=${`token ${query.token || ""}`} defaultValue=${query.token || ""} onChange=${(e) => set({ token: e.target.value })} aria-label="condition on tokens in SQL" title="rollouts with a token of which this holds: ratio > 2, abs(weight) > 0.01, trim(text) = 'wait'; columns: token, text, origin, learned, engine, before, learner, reference, entropy, weight, advantage, value, returns, teacher, after, ratio, place" />`}
      <span class="soft">${count === undefined ? "" : `${whole(count)} ${groups ? "groups" : "rollouts"}`}</span>
      ${chips.map(([name, value]) => html`<button class="on small" onClick=${() => set({ [name]: "" })} title="take this filter away">${visible(`${name} ${value}`)} ×</button>`)}
      ${Object.keys(filters).length ? html`<button class="small" onClick=${() => go(to(here().run, "rollouts"))}>all ( x )</button>` : ""}</div>
    ${query.q && about.unsearched ? html`<div class="note gap">${visible(about.unsearched)}</div>` : ""}
    <div class="row tight gap">${questions.filter((q) => !given(about.verb) || ALWAYS.includes(q.name)).map((q) => html`<button class=${query.ask === q.name ? "on" : ""} title=${q.means} onClick=${() => set({ ask: query.ask === q.name ? "" : q.name, sort: "", ...(["wrong", "lost"].includes(q.name) && query.ask !== q.name ? { as: "groups" } : {}) })}>${q.says}</button>`)}
      <span class="soft small">${asked ? asked.means : ""}${asked && RIGHT.includes(asked.name) && about.success === null ? " (right: the greatest reward of this run, as it has no --success)" : ""}</span></div>`;
}

function Head({ name, says, kind, sort, set }) {
  const on = sort.replace(/^-/, "") === name;
  const next = !on ? (kind === "n" ? `-${name}` : name) : sort.startsWith("-") ? name : `-${name}`;
  return html`<th class=${kind === "n" ? "n" : ""} aria-sort=${on ? (sort.startsWith("-") ? "descending" : "ascending") : "none"}><button onClick=${() => set({ sort: next })}>${visible(says)}${on ? (sort.startsWith("-") ? " ↓" : " ↑") : ""}</button></th>`;
}

function Cells({ row, run, parts, most, played, scored, success }) {
  const right = success !== null && row.reward !== null && outcome(row) >= success - 1e-6;
  return html`<td class="n">${row.step}${row.held_out ? html`<span class="faint"> held out</span>` : ""}</td><td class="n">${row.index}</td>
    <td class="mono"><a href=${to(run, "group", [part(row), row.index])} onClick=${(e) => e.stopPropagation()}>${line(row.group)}${row.side ? ` ${line(row.side)}` : ""}</a></td>
    <td class="mono untrusted prompt" dir="ltr">${line(row.prompt)}</td><td class="mono untrusted said" dir="ltr">${line(row.text)}</td>
    ${played ? html`<td class=${`n ${row.reward === null ? "bad" : right ? "good" : ""}`}>${row.reward === null ? "invalid" : f(row.reward)}</td>` : scored ? html`<td class="n">${f(row.reward)}</td>` : ""}
    ${parts.map((p) => html`<td class="n">${f(row[`part.${p}`])}</td>`)}
    ${played ? html`<td class="n"><${Signed} value=${row.advantage} most=${most} /></td><td class="n">${f(row.sd)}</td>` : ""}<td class="n">${whole(row.length)}</td>
    <td class=${row.truncated ? "warn" : ""}>${row.stop}</td>
    <td title=${visible(row.why || "")}><${Fate} fate=${row.fate} />${row.flags?.length ? html` <span class="faint">${row.flags.join(", ")}</span>` : ""}${row.replayed ? html` <span class="pill" title="sampled in an earlier step, and learned from again">replayed</span>` : ""}</td>`;
}

function GroupCells({ row, played }) {
  return html`<td class="n">${row.step}${row.held_out ? html`<span class="faint"> held out</span>` : ""}</td><td class="mono">${line(row.group)}${row.side ? ` ${line(row.side)}` : ""}</td>
    <td class="mono untrusted prompt" dir="ltr">${line(row.prompt)}</td><td class="mono untrusted said" dir="ltr">${line(row.text)}</td>
    ${played ? html`<td class=${`n ${row.right_n === row.n ? "good" : row.right_n ? "" : "bad"}`}>${row.right_n} of ${row.n}</td><td class="n">${f(row.mean)}</td><td class="n">${f(row.sd)}</td>` : ""}
    <td class="n">${row.replies}</td><td class="n">${f(row.length)}</td><td class="n">${row.epoch === null ? "–" : row.epoch + 1}</td>`;
}

/** The means of what is listed beside those of the rest, in one line. */
function Beside({ data, parts }) {
  const { these, others } = data;
  const shares = ["right", "trained", "cut off", "invalid"];
  const say = (name, value) => (value === null || value === undefined ? "–" : shares.includes(name) ? percent(value) : f(value));
  const names = ["reward", "right", ...parts.map((p) => `part.${p}`), "tokens", "trained", "cut off", "invalid", "advantage"].filter((n) => [these, others].some((side) => side[n] !== null && side[n] !== undefined && !(["cut off", "invalid"].includes(n) && !these[n] && !others[n])));
  return html`<div class="means small" role="status"><span>these <b>${whole(these.n)}</b> / the other ${whole(others.n)}</span>${names.map((n) => html`<span><span class="soft untrusted">${visible(n === "tokens" ? "length" : n.replace(/^part\./, ""))}</span> <b>${say(n, these[n])}</b> / ${say(n, others[n])}</span>`)}</div>`;
}

function Facets({ data, query, set }) {
  if (!data) return "";
  const toggle = (name, value) => {
    const chosen = new Set((query[name] || "").split("|").filter(Boolean));
    chosen.has(value) ? chosen.delete(value) : chosen.add(value);
    set({ [name]: [...chosen].join("|") });
  };
  const some = ["fate", "stop", "kind"].filter((name) => data[name] && (data[name].length > 1 || query[name]));
  const again = (data.replayed || []).find(([value]) => value === true);
  if (!some.length && !again) return "";
  return html`<div class="card hist" style=${{ flex: "2 1 220px" }}>${some.map((name) => html`<div class="facet" style=${{ marginBottom: "3px" }}><span class="soft small" style=${{ width: "28px" }}>${name}</span>
    ${data[name].map(([value, n]) => {
      const own = value === null ? "none" : value;
      return html`<button class=${`small pill ${(query[name] || "").split("|").includes(own) ? "on" : ""}`} onClick=${() => toggle(name, own)}>${own} ${whole(n)}</button>`;
    })}</div>`)}${again ? html`<div class="facet"><button class=${`small pill ${query.replayed === "1" ? "on" : ""}`} title="sampled in an earlier step, and learned from again" onClick=${() => set({ replayed: query.replayed === "1" ? "" : "1" })}>replayed ${whole(again[1])}</button>${query.replayed === "0" ? "" : html`<button class="small pill" onClick=${() => set({ replayed: "0" })}>without these</button>`}</div>` : ""}</div>`;
}
