// Measures that colour tokens: one number for each token, recorded or computed from recorded ones.

import { floats, integers } from "./format.js";
import { given, isPreferenceExample } from "./items.js";

/** A rollout as it came, with its numbers as arrays by token (nan: none). */
export function unpack(row) {
  if (row.isScored) return row;
  const n = {};
  for (const [name, text] of Object.entries(row.numbers)) n[name] = floats(text);
  const ids = integers(row.ids);
  const scored = new Uint8Array(ids.length);
  const sampled = new Uint8Array(ids.length);
  const version = new Float32Array(ids.length).fill(NaN);
  for (const [kind, start, length, made, learned] of row.spans) {
    const end = Math.min(start + length, row.end);
    for (let i = Math.max(start, row.begin); i < end; i++) {
      scored[i - row.begin] = learned ? 1 : 0;
      sampled[i - row.begin] = kind === "sampled" || kind === "imitated" ? 1 : 0;
      if (made !== null) version[i - row.begin] = made;
    }
  }
  return Object.assign(row, { n, ids, isScored: scored, isSampled: sampled, versionAt: version });
}

function each(length, at) {
  const found = new Float32Array(length);
  for (let i = 0; i < length; i++) found[i] = at(i);
  return found;
}

const logp = (row) => row.n.learner || row.n.before || row.n.engine;

function advantage(row) {
  if (row.n.token_advantage) return row.n.token_advantage;
  return row.advantage === null ? null : each(row.ids.length, (i) => (row.isScored[i] ? row.advantage : NaN));
}

function difference(a, b) {
  return a && b ? each(a.length, (i) => a[i] - b[i]) : null;
}

/** The denominator of the ratio of a row: the weights before the step, or those that sampled. */
const old = (row, about) => (about.sampler ? row.n.engine : row.n.before || row.n.engine);

export function ratios(row, about) {
  const below = old(row, about);
  return row.n.learner && below ? each(below.length, (i) => Math.exp(row.n.learner[i] - below[i])) : null;
}

/** -1: below the clip with a negative advantage, 1: above it with a positive one: no gradient; 0: neither; nan: has no ratio. */
export function clipped(row, about) {
  const ratio = ratios(row, about);
  const a = advantage(row);
  if (!ratio || !a || !about.bounds) return null;
  const [low, high] = about.bounds;
  return each(ratio.length, (i) => (Number.isNaN(ratio[i]) ? NaN : ratio[i] < low - 1e-6 && a[i] < 0 ? -1 : ratio[i] > high + 1e-6 && a[i] > 0 ? 1 : 0));
}

function divergence(row) {
  const own = logp(row);
  const other = row.n.reference;
  return own && other ? each(own.length, (i) => Math.exp(other[i] - own[i]) - (other[i] - own[i]) - 1) : null;
}

function versions(row) {
  const known = row.versionAt.filter((v) => !Number.isNaN(v));
  return known.length && Math.min(...known.slice(0, 50000)) !== Math.max(...known.slice(0, 50000)) ? row.versionAt : null;
}

const CONTRIBUTION = { says: "contribution", about: "what the token adds to the score of its response: its log-probability less the reference's, before the step" };

/** The record's `weight`. It is a gradient already: nothing here multiplies it by the advantage again. */
export const PUSH = "push on weights, as the run recorded it: minus the gradient of the loss at the token's log-probability, with its advantage, its ratio and its clip in it, summed over all passes of the step; above 0 it is made more likely";

/** The side of the bounds on which a ratio is, and whether that takes its gradient. */
export function clipText(ratio, advantage, [low, high]) {
  const side = ratio < low - 1e-6 ? -1 : ratio > high + 1e-6 ? 1 : 0;
  if (!side) return `within ${low} … ${high}`;
  const where = side > 0 ? `above ${high}` : `below ${low}`;
  if (side * advantage > 0) return `${where}: no gradient in its last update`;
  return `${where}, not clipped: A ${advantage > 0 ? "> 0" : advantage < 0 ? "< 0" : "is 0"}`;
}

/** name, label of the button, whether it has a sign, and the numbers of a rollout or null. */
export const MEASURES = [
  { name: "advantage", says: "advantage", sign: true, of: advantage },
  { name: "push", says: "push", sign: true, about: PUSH, of: (row) => row.n.weight || null },
  { name: "surprise", says: "surprise", of: (row) => (row.n.engine || logp(row)) && each(row.ids.length, (i) => -(row.n.engine || logp(row))[i]) },
  { name: "entropy", says: "entropy", of: (row) => row.n.entropy || null },
  { name: "ratio", says: "log ratio", sign: true, of: (row, about) => difference(row.n.learner, old(row, about)) },
  { name: "kl", says: "KL", of: divergence },
  { name: "reference", says: "− reference", sign: true, of: (row) => difference(logp(row), row.n.reference) },
  { name: "gap", says: "− engine", sign: true, of: (row) => difference(row.n.before, row.n.engine) },
  { name: "change", says: "change", about: "of the log-probability, by the whole step", sign: true, of: (row) => difference(row.n.after, row.n.before || row.n.engine) },
  { name: "teacher", says: "teacher −", sign: true, of: (row) => difference(row.n.teacher, logp(row)) },
  { name: "value", says: "value", sign: true, of: (row) => row.n.value || null },
  { name: "returns", says: "return", sign: true, of: (row) => row.n.returns || null },
  { name: "version", says: "weights", of: versions },
];

/** Those that a rollout has, with their numbers and the scale: {name, says, sign, values, most, least, blank}. */
export function measured(row, about) {
  unpack(row);
  const found = [];
  for (const measure of MEASURES) {
    if (given(row.kind) && ["ratio", "advantage"].includes(measure.name)) continue; // nobody sampled them
    const values = measure.of(row, about);
    if (!values) continue;
    const every = new Float32Array(values.length);
    let known = 0;
    let least = Infinity;
    for (const value of values) {
      if (Number.isFinite(value)) {
        every[known++] = Math.abs(value);
        if (value < least) least = value;
      }
    }
    const sizes = every.subarray(0, known).sort();
    if (!sizes.length) continue;
    const most = sizes[Math.min(sizes.length - 1, Math.floor(0.98 * sizes.length))] || sizes.at(-1) || 1;
    const contribution = isPreferenceExample(row.kind) && measure.name === "reference" ? CONTRIBUTION : {};
    found.push({ ...measure, ...contribution, values, most, least: measure.name === "version" ? least - 1 : 0, blank: sizes.at(-1) === 0 });
  }
  return found;
}

/** The one of these names to colour by at first: the first with any value. */
export const firstOf = (all, names) => names.map((n) => all.find((m) => m.name === n && !m.blank)).find(Boolean) || all.find((m) => !m.blank) || all[0];

/** The class that colours a token: six steps on either side. */
export function shade(measure, value) {
  if (Number.isNaN(value)) return "";
  if (measure.sign) {
    const step = Math.min(6, Math.ceil((6 * Math.abs(value)) / measure.most - 0.05));
    return step > 0 && measure.most > 0 ? (value > 0 ? ` p${step}` : ` n${step}`) : "";
  }
  const step = Math.min(6, Math.ceil((6 * (value - measure.least)) / (measure.most - measure.least || 1) - 0.05));
  return step > 0 ? ` s${step}` : "";
}
