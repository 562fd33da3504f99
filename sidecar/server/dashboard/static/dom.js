// Elements and words. Text only ever becomes a text node: the page's policy forbids anything else.

export const byId = (id) => document.getElementById(id);

/** Make an element: `el("td", {class: "n", "aria-label": "…"}, "text", child)`. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Set text where it is another, so that nothing is announced or laid out for nothing. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en");
export const count = (value) => whole.format(value);

/** A count; with ≥ where it is not known to be whole. */
export const atLeast = (value, isWhole) => `${isWhole ? "" : "≥ "}${count(value)}`;

export function bytes(value) {
  if (!value) return "";
  const units = ["B", "KB", "MB", "GB", "TB"];
  const power = Math.min(Math.floor(Math.log10(value) / 3), units.length - 1);
  const number = value / 1000 ** power;
  return `${number >= 100 || power === 0 ? number.toFixed(0) : number.toFixed(1)} ${units[power]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return "< 1 ms";
  if (value < 1) return `${(1000 * value).toFixed(0)} ms`;
  return `${value < 10 ? value.toFixed(1) : value.toFixed(0)} s`;
}

export function ago(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (value >= 2 * size) return `${Math.round(value / size)} ${unit}`;
  }
  return `${Math.max(0, Math.round(value))} s`;
}

/** A time of day, with its date where that is another one: of seconds since 1970. */
export function clock(unix_s) {
  const at = new Date(1000 * unix_s);
  const time = at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
}

export function percent(part, all) {
  if (!all) return "–";
  const value = (100 * part) / all;
  return `${value > 0 && value < 99.95 && value >= 0.05 ? value.toFixed(1) : value.toFixed(0)} %`;
}
