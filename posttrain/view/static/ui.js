// What pages share: answers that arrive, keys, small parts.

import { ask } from "./net.js";
import { f, visible } from "./format.js";

export const { html, render, useState, useEffect, useRef, useMemo, useLayoutEffect } = window.htmPreact;

/** The answer to a path and a query: {data, problem, stale}. The last answer stays until the next one is there. */
export function useAnswer(path, query = {}, version = 0) {
  const key = path && path + "?" + JSON.stringify(query);
  const [state, set] = useState({ data: null, problem: null, key: null, path: null });
  useEffect(() => {
    if (!path) return undefined;
    const control = new AbortController();
    ask(path, query, control.signal).then(
      (data) => set({ data, problem: null, key, path }),
      (error) => error.name === "AbortError" || set((s) => ({ data: s.path === path ? s.data : null, problem: error.message, key, path })),
    );
    return () => control.abort();
  }, [key, version]);
  return { data: state.data, problem: state.problem, stale: state.key !== key, of: state.key };
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
  trained: "good", "equal group": "plain", invalid: "bad", "group too small": "plain", replaced: "plain", filtered: "warn", "not selected": "plain",
};

export const Fate = ({ fate }) => html`<span class=${FATES[fate] || "faint"}>${fate || ""}</span>`;

/** A colour of the theme, for what is drawn on a canvas. */
export function colour(name, alpha = 1) {
  const style = getComputedStyle(document.documentElement);
  const value = style.getPropertyValue(`--${name}`).trim();
  if (alpha === 1) return value;
  const full = value.length === 4 ? "#" + [...value.slice(1)].map((c) => c + c).join("") : value;
  return full + Math.round(255 * alpha).toString(16).padStart(2, "0");
}

/** A canvas that is drawn again when its size, the theme or what it shows changes. */
export function Canvas({ draw, label, deps, ...rest }) {
  const ref = useRef();
  useLayoutEffect(() => {
    const canvas = ref.current;
    const paint = () => {
      const { clientWidth: w, clientHeight: h } = canvas;
      const scale = window.devicePixelRatio || 1;
      canvas.width = w * scale;
      canvas.height = h * scale;
      const pen = canvas.getContext("2d");
      pen.scale(scale, scale);
      draw(pen, w, h);
    };
    paint();
    const watch = new ResizeObserver(paint);
    watch.observe(canvas);
    addEventListener("theme", paint);
    return () => {
      watch.disconnect();
      removeEventListener("theme", paint);
    };
  }, deps);
  return html`<canvas ref=${ref} role="img" aria-label=${label} ...${rest}></canvas>`;
}
