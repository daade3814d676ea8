// The frame: which run and which page the address names, the keys that work everywhere, light and dark.

import { Compare } from "./compare.js";
import { Evaluation } from "./evaluation.js";
import { visible } from "./format.js";
import { Group } from "./group.js";
import { ask, exported, go, here, to } from "./net.js";
import { Overview } from "./overview.js";
import { Rollout } from "./rollout.js";
import { Rollouts } from "./rollouts.js";
import { Step } from "./step.js";
import { html, Problem, render, useEffect, useKeys, useLayoutEffect, useState } from "./ui.js";

const PAUSE = 2000; // milliseconds between two looks at runs that are on
const SOON = [200, 500]; // and while one is read: its rollouts, their texts

const PAGES = [["overview", "Overview", "o"], ["rollouts", "Rollouts", "r"], ["rollout", "One rollout", "t"], ["group", "Group", "g"], ["step", "Step", "s"], ["compare", "Compare", "c"], ["evaluation", "Evaluation", "v"]];

const HELP = [
  ["o  r  s  c  v", "Overview, Rollouts, Step, Compare, Evaluation"], ["/", "search"], ["j  k", "next, previous: row, rollout, visit, step"], ["Enter", "open what is chosen"], ["g", "the group"],
  ["h  l", "previous, next in the group"], ["←  →", "the token before, the next one"], ["1 … 9", "colour by that number"], ["0", "no colours"], ["a", "rollouts or groups"], ["x", "no filters"],
  ["n  p", "next, previous page of the list"], ["[  ]", "the step before, the next one"], ["s", "in Compare: swap A and B"], ["e", "one HTML file: of the run, or of what is listed"], ["f", "in a rollout: the reply as a text file"], ["i", "the picture, larger"], ["←  →", "on a histogram (Tab): choose; Shift widens, Enter takes"], ["u", "the next run"], ["d", "light or dark"], ["Backspace", "back to the list"], ["?", "this help"], ["Esc", "close, leave a field"],
];

function themed(name) {
  document.documentElement.dataset.theme = name;
  dispatchEvent(new Event("theme"));
}

function preferred() {
  const kept = localStorageItem();
  return kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function localStorageItem(value) {
  try {
    if (value) localStorage.setItem("posttrain-theme", value);
    return localStorage.getItem("posttrain-theme");
  } catch {
    return null; // a file opened from disk may have none
  }
}

themed(preferred());

function App() {
  const [state, set] = useState({ runs: null, questions: [], evaluations: [], problem: null });
  const [place, setPlace] = useState(here());
  const [help, setHelp] = useState(false);
  useLayoutEffect(() => {
    const moved = () => setPlace(here());
    moved();
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    let timer = 0;
    let last = "";
    const look = () =>
      ask("runs").then(
        ({ runs, questions, evaluations }) => {
          const now = JSON.stringify(runs);
          if (now !== last) set({ runs, questions, evaluations, problem: null });
          last = now;
          const pause = runs.some((r) => r.progress < 1) ? SOON[0] : runs.some((r) => !r.searchable) ? SOON[1] : PAUSE;
          if (!exported) timer = setTimeout(look, pause);
        },
        () => {
          set((s) => ({ ...s, problem: "The server is gone: start posttrain view again." }));
          timer = setTimeout(look, PAUSE);
          last = "";
        },
      );
    look();
    return () => clearTimeout(timer);
  }, []);
  const { run, words, query } = place;
  const page = state.runs && !state.runs.length ? "evaluation" : place.page;
  const jump = (name) => () => go(to(run, name));
  const theme = () => themed(localStorageItem(document.documentElement.dataset.theme === "dark" ? "light" : "dark") || (document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  useKeys({
    "?": () => setHelp(!help), Escape: (e) => (help ? setHelp(false) : e.target.blur?.()), o: page === "group" ? undefined : jump("overview"), r: page === "step" ? undefined : jump("rollouts"), s: page === "compare" ? undefined : jump("step"), c: exported ? undefined : jump("compare"), v: state.evaluations.length ? jump("evaluation") : undefined, d: theme, e: () => [...document.querySelectorAll("a.export")].at(-1)?.click(),
    u: () => state.runs?.length && go(to((run + 1) % state.runs.length, ["overview", "rollouts"].includes(page) ? page : "overview")),
  });
  const about = state.runs?.[run];
  const shownPages = PAGES.filter(([name]) => (name === "evaluation" ? state.evaluations.length : state.runs?.length !== 0 && !(exported && ["step", "compare"].includes(name))));
  return html`<header class="top"><span class="brand">posttrain <b>view</b></span>
      ${state.runs && state.runs.length > 1 ? html`<select value=${run} onChange=${(e) => go(to(e.target.value, ["overview", "rollouts"].includes(page) ? page : "overview"))} aria-label="run">${state.runs.map((r, i) => html`<option value=${i}>${visible(r.name)}</option>`)}</select>` : html`<span class="soft">${visible(about?.name || "")}</span>`}
      <nav aria-label="pages">${shownPages.map(([name, says]) => html`<a class=${page === name ? "on" : ""} aria-current=${page === name ? "page" : undefined} href=${["rollout", "group"].includes(name) ? remembered(name, run) : to(run, name)}>${says}</a>`)}</nav>
      <span class="fill"></span>
      ${about && about.progress < 1 ? html`<span class="soft small">reading ${Math.round(100 * about.progress)}%</span>` : about?.on ? html`<span class="badge good">on</span>` : ""}
      ${exported ? html`<span class="soft small">exported</span>` : about && html`<a class="small export" href=${`export/${run}`} download title="e">one HTML file</a>`}
      <button onClick=${theme} title="light or dark ( d )" aria-label="light or dark">◐</button><button onClick=${() => setHelp(true)} title="keys ( ? )" aria-label="help">?</button></header>
    <main>${state.problem ? html`<${Problem} text=${state.problem} />` : ""}${about?.problem ? html`<${Problem} text=${visible(about.problem)} />` : ""}
      ${page === "evaluation" && state.evaluations.length ? html`<${Evaluation} key=${words[0] || 0} ...${{ run, words, evaluations: state.evaluations }} />` : about ? html`<${Page} key=${`${run}/${page}`} ...${{ run, page, words, query, about, runs: state.runs, questions: state.questions }} />` : state.runs ? html`<${Problem} text="there is no such run" />` : ""}</main>
    ${help ? html`<${Help} close=${() => setHelp(false)} />` : ""}`;
}

const last = { rollout: "", group: "" }; // the addresses that were open last

function remembered(name, run) {
  const { page, words } = here();
  if (page === name) last[name] = location.hash;
  if (name === "group" && page === "rollout" && words.length === 2) return to(run, "group", words);
  if (last[name].startsWith(`#/${run}/`)) return last[name];
  return to(run, name);
}

function Page({ run, page, words, query, about, runs, questions }) {
  const given = { run, words, query, about, runs, questions };
  if (page === "rollouts") return html`<${Rollouts} ...${given} />`;
  if (page === "rollout") return html`<${Rollout} ...${given} />`;
  if (page === "group") return html`<${Group} ...${given} />`;
  if (page === "step") return html`<${Step} ...${given} />`;
  if (page === "compare") return html`<${Compare} ...${given} />`;
  if (page === "pair") return html`<${Pair} ...${given} />`;
  if (page === "overview") return html`<${Overview} ...${given} />`;
  return html`<${Problem} text="there is no such page" />`;
}

/** Two groups of one task, of A above and of B below. */
function Pair({ run, words, query, runs }) {
  const [partA, indexA, other, partB, indexB] = words;
  return html`<h2 class="gap"><span class="down">A</span> ${visible(runs[run].name)}</h2><${Group} run=${run} about=${runs[run]} words=${[partA, indexA]} query=${query} />
    <h2 class="gap" style=${{ marginTop: "18px" }}><span class="up">B</span> ${visible(runs[Number(other)]?.name || "")}</h2><${Group} run=${Number(other)} about=${runs[Number(other)]} words=${[partB, indexB]} query=${query} />`;
}

function Help({ close }) {
  return html`<div class="veil" onClick=${close}><div class="help" role="dialog" aria-label="keys" onClick=${(e) => e.stopPropagation()}><div class="row"><h2>Keys</h2><span class="fill"></span><button onClick=${close}>close</button></div>
    <div class="help-columns">${HELP.map(([keys, says]) => html`<div><span>${keys.split("  ").map((k) => html`<kbd>${k}</kbd> `)}</span><span class="soft">${says}</span></div>`)}</div></div></div>`;
}

render(html`<${App} />`, document.getElementById("app"));
