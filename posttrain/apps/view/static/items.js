// Rows of the user: demonstrations and preference examples. No environment scores them.

import { f } from "./format.js";
import { LEARNS } from "./verbs.js";

/** Whether a kind of row, or a verb, is of given rows. */
export const given = (kind) => ["demonstrations", "preferences", "scores"].includes(LEARNS[kind]);

export const isPreferenceExample = (kind) => ["preferences", "scores"].includes(LEARNS[kind]);

export const isScored = (kind) => LEARNS[kind] === "scores";

export const onTokens = (kind) => ["demonstrations", "rollouts"].includes(LEARNS[kind]);

/** The labels of a response, as {text, tone}: chosen, rejected, its place among several, its labels. */
export function saidOf(row) {
  const { comparisons = [], labels = [] } = row.label && typeof row.label === "object" ? row.label : {};
  const won = comparisons.filter(([better]) => better === row.member);
  const lost = comparisons.filter(([, worse]) => worse === row.member);
  const share = ([, , part]) => (part === undefined || part === 1 ? "" : ` (${f(100 * part)}%)`);
  const found = [];
  if (won.length + lost.length === 1) found.push(won.length ? { text: `chosen${share(won[0])}`, tone: "up" } : { text: `rejected${share(lost[0])}`, tone: "down" });
  else {
    if (won.length) found.push({ text: `better than ${won.map((c) => c[1] + share(c)).join(", ")}`, tone: "up" });
    if (lost.length) found.push({ text: `worse than ${lost.map((c) => c[0] + share(c)).join(", ")}`, tone: "down" });
  }
  if (Array.isArray(labels) && labels.length) found.push({ text: `label ${labels.map((v) => f(v)).join(", ")}`, tone: labels.length === 1 && labels[0] > 0.5 ? "up" : labels.length === 1 ? "down" : "" });
  return found;
}

/** The sum of what its tokens add to its score: log-probabilities less the reference's. null: not recorded. */
export function scoreOf(measures) {
  const own = measures.find((m) => m.name === "reference");
  return own ? own.values.reduce((sum, v) => (Number.isNaN(v) ? sum : sum + v), 0) : null;
}
