// Numbers and texts as a reader sees them.

const MINUS = "−";

/** A number with three significant digits, no trailing zeros, thin signs; "–" for none. */
export function f(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : MINUS + "∞";
  const size = Math.abs(value);
  if (size >= 10000) return value.toLocaleString("en", { maximumFractionDigits: 0 }).replace("-", MINUS);
  if (size !== 0 && size < 1e-4) return value.toExponential(1).replace("-", MINUS).replace("e-", "e" + MINUS);
  return String(Number(value.toPrecision(digits))).replace("-", MINUS);
}

export const signed = (value) => (value > 0 ? "+" : "") + f(value);

export const whole = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));

export const percent = (value) => `${f(100 * value)}%`;

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${f(value)} s`;
}

const CONTROLS = "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");
const NAMES = {
  0x7f: "DEL",
  0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200d: "ZWJ", 0x200e: "LRM", 0x200f: "RLM", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF",
  0x202d: "LRO", 0x202e: "RLO", 0x2060: "WJ", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0xfeff: "BOM",
  0x061c: "ALM", 0x2028: "LS", 0x2029: "PS",
};
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** A text with what a screen would hide, or turn around, made visible. */
export function visible(text) {
  if (!text) return "";
  return text.replace(HIDDEN, (c) => {
    const code = c.codePointAt(0);
    if (code < 0x20) return `⟨${CONTROLS[code]}⟩`;
    return NAMES[code] ? `⟨${NAMES[code]}⟩` : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** A text as a word of a shell's command line. */
export function inShell(text) {
  if (/^[\w./+:@%-]+$/.test(text)) return text;
  return text.includes("'") ? `"${text.replace(/["\\$`]/g, "\\$&")}"` : `'${text}'`;
}

const PICTURE = /\[sha256:[0-9a-f]{64}\]/g;

/** A prompt as a reader sees it: pictures are beside it, not their hashes in it. */
export const readable = (text) => visible(text).replace(PICTURE, "▣ ");

/** The same in one line. */
export const line = (text) => readable(text).replace(/\n/g, "↵").replace(/\t/g, "⇥");

/** What success is compared with: the part "outcome" of a row's reward, or all of it. */
export const outcome = (row) => row["part.outcome"] ?? row.reward;

export const shown = (value) => (typeof value === "string" ? visible(value) : JSON.stringify(value));

/** float32 numbers of base64; nan where nothing was recorded. */
export function floats(text) {
  return new Float32Array(bytes(text).buffer);
}

export function integers(text) {
  return new Int32Array(bytes(text).buffer);
}

function bytes(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}
