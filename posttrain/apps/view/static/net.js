// The source of answers: the server, or, in an exported file, the file itself. And the reading of the address.

import { local } from "./local.js";

const embedded = document.getElementById("data");
export const exported = embedded !== null;

async function unpacked() {
  const raw = atob(embedded.textContent);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

let packed = null;

/** The answer to a path and a query, or an Error whose one line describes the fault. */
export async function ask(path, query = {}, signal = undefined) {
  if (exported) {
    packed = packed || unpacked();
    return local(await packed, path, query);
  }
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined));
  const answer = await fetch(`api/${path}${words.size ? "?" + words : ""}`, { signal });
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.problem || `the server answered ${answer.status}`);
  return data;
}

/** The content of the address behind the #: {run, page, words, query}. */
export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [run, page, ...words] = path.split("/").map(decodeURIComponent);
  return { run: Number(run) || 0, page: page || "overview", words, query: Object.fromEntries(new URLSearchParams(query || "")) };
}

/** The address of a state. */
export function to(run, page, words = [], query = {}) {
  const kept = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null));
  return `#/${[run, page, ...words].map(encodeURIComponent).join("/")}${kept.size ? "?" + kept : ""}`;
}

/** Open an address at once: the browser itself would report it only after keys that were pressed meanwhile. */
export function go(address, replace = false) {
  history[replace ? "replaceState" : "pushState"](null, "", address);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** Change some of the query of the address that is open; empty values leave it. */
export function change(changes, replace = true) {
  const { run, page, words, query } = here();
  go(to(run, page, words, { ...query, ...changes }), replace);
}

export const part = (row) => `${row.step}${row.held_out ? "e" : ""}`;
