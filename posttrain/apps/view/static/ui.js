// Tools that pages share: answers that arrive, keys, small components.

import { ask } from "./net.js";
import { f, visible } from "./format.js";

export const { html, render, useState, useEffect, useRef, useMemo, useLayoutEffect } = window.htmPreact;

const LONG = 250; // milliseconds after which what waits for an answer turns pale: a change of opacity paints everything again

/**
 * The answer to a path and a query: {data, problem, stale, waiting}. The last answer stays until the next one is there;
 * `waiting` is its class meanwhile.
 */
export function useAnswer(path, query = {}, version = 0) {
  const key = path && path + "?" + JSON.stringify(query);
  const [state, set] = useState({ data: null, problem: null, key: null, path: null });
  const [pale, setPale] = useState(null);
  useLayoutEffect(() => {
    // not useEffect, which runs after the next frame: the question would wait for it
    if (!path) return undefined;
    const control = new AbortController();
    const timer = setTimeout(() => setPale(key), LONG);
    const answered = (answer) => {
      clearTimeout(timer);
      // An answer that has not changed is not drawn again.
      set((last) => (last.key === key && JSON.stringify(last.data) === JSON.stringify(answer.data ?? null) && !answer.problem ? last : { data: answer.problem && last.path === path ? last.data : null, problem: null, key, path, ...answer }));
    };
    ask(path, query, control.signal).then(
      (data) => answered({ data }),
      (error) => error.name === "AbortError" || answered({ problem: error.message }),
    );
    return () => {
      control.abort();
      clearTimeout(timer);
    };
  }, [key, version]);
  const stale = state.key !== key;
  return { data: state.data, problem: state.problem, stale, waiting: stale ? (pale === key ? "stale pale" : "stale") : "", of: state.key };
}

/** Keys while a part is there: {j: action, ...}. What is typed into a field is not taken. */
export function useKeys(keys) {
  const latest = useRef(keys);
  latest.current = keys;
  useLayoutEffect(() => {
    // not useEffect, which runs after the next frame: a key pressed before it would be lost
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
      if (typing && event.key !== "Escape") return;
      const onControl = /^(BUTTON|A|SUMMARY)$/.test(event.target.tagName) && event.key === "Enter";
      const action = onControl ? undefined : latest.current[event.key];
      if (action) {
        event.preventDefault();
        action(event);
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

addEventListener("click", (event) => event.detail && event.target.closest?.("button")?.blur()); // or Enter would press it again, after j

export const Problem = ({ text }) => html`<div class="problem" role="alert">${text}</div>`;

export const Empty = ({ children }) => html`<div class="card empty">${children}</div>`;

export const Text = ({ children, tag = "span", ...rest }) => html`<${tag} ...${rest} class=${`untrusted ${rest.class || ""}`}>${visible(children)}</${tag}>`;

/** A number with a bar from the middle, so that sign and size are seen before it is read. */
export function Signed({ value, most }) {
  if (value === null || value === undefined) return html`<span class="faint">–</span>`;
  const width = Math.min(38, (38 * Math.abs(value)) / (most || 1));
  return html`<span class="nowrap">${value ? html`<span class=${`bar ${value > 0 ? "up" : "down"}`} style=${{ width: `${Math.max(2, width)}px` }}></span>` : ""}<span class=${value > 0 ? "up" : value < 0 ? "down" : "faint"}>${f(value)}</span></span>`;
}

export const FATES = {
  trained: "good", "equal group": "plain", invalid: "bad", "group too small": "plain", replaced: "plain", filtered: "warn", baseline: "plain", "not selected": "plain",
};

export const Fate = ({ fate }) => html`<span class=${FATES[fate] || "faint"}>${fate || ""}</span>`;

const colours = new Map(); // of the theme; to ask the browser makes it work out all styles
addEventListener("theme", () => colours.clear());

/** A colour of the theme, for what is drawn on a canvas. */
export function colour(name, alpha = 1) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  const value = colours.get(name);
  if (alpha === 1) return value;
  const full = value.length === 4 ? "#" + [...value.slice(1)].map((c) => c + c).join("") : value;
  return full + Math.round(255 * alpha).toString(16).padStart(2, "0");
}

/** A canvas that is drawn again when its size, the theme or what it shows changes. */
export function Canvas({ draw, label, deps, ...rest }) {
  const ref = useRef();
  const latest = useRef();
  const size = useRef(null); // as of the last layout: to ask for it makes the browser lay out the page
  latest.current = draw;
  const paint = () => {
    if (!size.current) return;
    const [w, h] = size.current;
    const scale = window.devicePixelRatio || 1;
    const canvas = ref.current;
    if (canvas.width !== Math.round(w * scale) || canvas.height !== Math.round(h * scale)) {
      canvas.width = Math.round(w * scale);
      canvas.height = Math.round(h * scale);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, w, h);
    latest.current(pen, w, h);
  };
  useLayoutEffect(() => {
    const watch = new ResizeObserver(([entry]) => {
      size.current = [entry.contentRect.width, entry.contentRect.height];
      paint();
    });
    watch.observe(ref.current);
    addEventListener("theme", paint);
    return () => {
      watch.disconnect();
      removeEventListener("theme", paint);
    };
  }, []);
  useLayoutEffect(paint, deps);
  return html`<canvas ref=${ref} role="img" aria-label=${label} ...${rest}></canvas>`;
}
