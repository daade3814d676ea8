// Answers about the rollouts that an exported file holds: the same questions, without a database.

import { outcome } from "./format.js";

const ROWS = 100;

export function local(kept, path, query) {
  if (path === "runs") return { ...kept.runs, questions: kept.runs.questions.filter((q) => ["longest", "best", "cut"].includes(q.name)) };
  const name = path.split("/").slice(1).join("/");
  if (name === "rollouts") return page(kept, query);
  if (name === "histograms") return histograms(matching(kept.rows, query), (query.of || "reward,advantage,length").split(","));
  if (name === "means") return meansOf(kept, query);
  if (path.startsWith("picture/")) return { address: kept.pictures[path.slice(8)] || "" };
  if (name.startsWith("group/")) return group(kept, name.slice(6));
  if (path in kept) return kept[path];
  throw new Error("that is not in this file: it holds one run and some of its rollouts");
}

function matching(rows, query) {
  const found = (query.q || "").toLowerCase();
  const tests = Object.entries(query).flatMap(([name, value]) => test(name, value));
  return rows.filter((row) => tests.every((t) => t(row)) && (!found || `${row.prompt}\n${row.text}`.toLowerCase().includes(found)));
}

function test(name, value) {
  if (value === "") return [];
  if (["fate", "stop", "kind"].includes(name)) return [(row) => value.split("|").includes(row[name] || "none")];
  if (["task", "group", "side"].includes(name)) return [(row) => row[name] === value];
  if (name === "held") return [(row) => row.held_out === (value === "1")];
  if (name === "replayed") return [(row) => Boolean(row.replayed) === (value === "1")];
  if (name === "ask") return value === "cut" ? [(row) => row.truncated] : [];
  if (["q", "sort", "as", "of", "offset", "limit", "where", "token", "sel"].includes(name)) return [];
  const [low, high] = value.includes("..") ? value.split("..") : [value, value];
  return [(row) => row[name] !== null && (low === "" || row[name] >= Number(low)) && (high === "" || row[name] <= Number(high))];
}

function page(kept, query) {
  const rows = matching(kept.rows, query);
  const order = query.sort || { longest: "-length", best: "-reward" }[query.ask] || "";
  const name = order.replace(/^-/, "");
  const sign = order.startsWith("-") ? -1 : 1;
  if (name) {
    rows.sort((a, b) => {
      if (a[name] === null || a[name] === undefined) return 1;
      if (b[name] === null || b[name] === undefined) return -1;
      return sign * (a[name] > b[name] ? 1 : a[name] < b[name] ? -1 : 0);
    });
  }
  const offset = Number(query.offset || 0);
  return { rows: rows.slice(offset, offset + Number(query.limit || ROWS)), count: rows.length, sql: "" };
}

function histograms(rows, names) {
  const found = {};
  for (const name of names) {
    const values = rows.map((row) => row[name]).filter((v) => typeof v === "number");
    const low = Math.min(...values);
    const high = Math.max(...values);
    const width = (high - low) / 32 || 1;
    const bins = new Map();
    for (const value of values) {
      const bin = Math.floor((value - low) / width + 1e-9);
      bins.set(bin, (bins.get(bin) || 0) + 1);
    }
    found[name] = { low: values.length ? low : null, high, width, count: values.length, none: rows.length - values.length, bins: [...bins].sort((a, b) => a[0] - b[0]) };
  }
  for (const name of ["fate", "stop", "kind", "replayed"]) {
    const counts = new Map();
    for (const row of rows) counts.set(row[name], (counts.get(row[name]) || 0) + 1);
    found[name] = [...counts].sort((a, b) => b[1] - a[1]);
  }
  return found;
}

/** Means of the rows that are meant and of the others. */
function meansOf(kept, query) {
  const held = matching(kept.rows, { held: query.held || "" });
  const own = new Set(matching(held, query));
  const success = kept.runs.runs[0].success;
  const side = (rows) => {
    const mean = (of) => {
      const values = rows.map(of).filter((v) => typeof v === "number" && Number.isFinite(v));
      return values.length ? values.reduce((sum, v) => sum + v, 0) / values.length : null;
    };
    const found = { n: rows.length, reward: mean((r) => r.reward), tokens: mean((r) => r.length), trained: mean((r) => Number(r.fate === "trained")), "cut off": mean((r) => Number(r.truncated)), invalid: mean((r) => Number(r.reward === null)), advantage: mean((r) => r.advantage) };
    if (success !== null) found.right = mean((r) => (r.reward === null ? null : Number(outcome(r) >= success - 1e-6)));
    for (const part of kept.runs.runs[0].parts) found[`part.${part}`] = mean((r) => r[`part.${part}`]);
    return found;
  };
  const others = held.filter((row) => !own.has(row));
  return own.size && others.length ? { these: side([...own]), others: side(others) } : {};
}

function group(kept, place) {
  const [name, index] = place.split("/");
  const own = kept.rows.find((row) => `${row.step}${row.held_out ? "e" : ""}` === name && row.index === Number(index));
  if (!own) throw new Error("that group is not in this file");
  const rows = kept.rows.filter((row) => row.step === own.step && row.held_out === own.held_out && row.group === own.group && row.side === own.side);
  const rollouts = rows.map((row) => kept[`0/rollout/${name}/${row.index}`]);
  const about = { ...own, mean: own.mean, sd: own.sd, n: own.n, valid: own.n, replies: new Set(rows.map((r) => r.text)).size };
  return { group: about, rollouts, visits: [], hidden: own.n - rows.length };
}
