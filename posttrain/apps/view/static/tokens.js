// Tokens as text, each coloured by a number. However many there are, only those near the screen are elements of their own:
// the rest is plain text of the same size, which scrolls, wraps and can be searched in the same way.

import { html, useEffect, useLayoutEffect, useRef } from "./ui.js";
import { visible } from "./format.js";
import { shade } from "./measures.js";

const CHUNK = 400; // tokens of a piece of the page, at least; it ends with a line
const LONGEST = 800; // and at most, where no line ends

/** [begin, end) of chunks of the tokens from `begin` to `end`. */
export function chunks(pieces, begin, end) {
  const found = [];
  let first = begin;
  for (let i = begin; i < end; i++) {
    const long = i - first + 1;
    if ((long >= CHUNK && pieces[i].endsWith("\n")) || long >= LONGEST) {
      found.push([first, i + 1]);
      first = i + 1;
    }
  }
  if (first < end) found.push([first, end]);
  return found;
}

const textOf = (piece, last) => visible(piece).replace(/\n/g, last ? "↵" : "↵\n");

function className(row, measure, clip, i) {
  let name = "t";
  if (!row.isScored[i] && !row.isSampled[i]) name += " context";
  if (measure) name += shade(measure, measure.values[i]);
  if (clip && clip[i]) name += " clip";
  if (row.n.kept && row.n.kept[i] === 0) name += " dropped";
  return name;
}

function fill(element, row, look) {
  const [begin, end] = element.range;
  const found = document.createDocumentFragment();
  for (let i = begin; i < end; i++) {
    const span = document.createElement("span");
    span.className = className(row, look.measure, look.clip, i);
    span.dataset.i = i;
    span.textContent = textOf(row.pieces[i], i === end - 1);
    found.append(span);
  }
  element.replaceChildren(found);
  element.filled = true;
}

function paint(element, row, look) {
  for (const span of element.children) span.className = className(row, look.measure, look.clip, Number(span.dataset.i));
}

/** Tokens `begin` to `end` of a rollout. `at`: the token under the cursor, `onAt`: another one is. */
export function Tokens({ row, begin = 0, end = row.pieces.length, measure, clip, at, onAt, dense }) {
  const place = useRef();
  const look = useRef({});
  look.current = { measure, clip };
  useLayoutEffect(() => {
    const root = place.current;
    const parts = chunks(row.pieces, begin, end).map((range) => {
      const element = document.createElement("div");
      element.className = "chunk";
      element.range = range;
      return element;
    });
    root.replaceChildren(...parts);
    const near = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) if (isIntersecting && !target.filled) fill(target, row, look.current);
      },
      { root: root.closest(".tokens"), rootMargin: "600px" },
    );
    parts.forEach((element, i) => {
      if (i < 2) fill(element, row, look.current);
      else {
        element.textContent = row.pieces.slice(...element.range).map((p, k, all) => textOf(p, k === all.length - 1)).join("");
        near.observe(element);
      }
    });
    return () => near.disconnect();
  }, [row, begin, end]);
  useEffect(() => {
    for (const element of place.current.children) if (element.filled) paint(element, row, look.current);
    mark(place.current, row, look.current, at, false);
  }, [measure, clip, row]);
  useEffect(() => {
    mark(place.current, row, look.current, at, onAt !== undefined);
  }, [at, row]);
  const over = (event) => {
    const i = event.target.dataset.i;
    if (i !== undefined && onAt) onAt(Number(i));
  };
  return html`<div class=${`text${dense ? " dense" : ""}`} dir="ltr" ref=${place} onMouseOver=${over}></div>`;
}

function mark(root, row, look, at, scroll) {
  root.querySelector(".t.at")?.classList.remove("at");
  if (at === undefined || at === null) return;
  for (const element of root.children) {
    if (at < element.range[0] || at >= element.range[1]) continue;
    if (!element.filled) fill(element, row, look);
    const span = element.children[at - element.range[0]];
    span.classList.add("at");
    const frame = root.closest(".tokens");
    if (scroll && frame) {
      const box = span.getBoundingClientRect();
      const seen = frame.getBoundingClientRect();
      if (box.top < seen.top || box.bottom > seen.bottom) span.scrollIntoView({ block: "center" });
    }
  }
}
