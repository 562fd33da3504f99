// The table of adapters: as many rows as fit are elements, whatever the number there is.
// Keyboard and screen readers see one grid: the active row is told by aria-activedescendant.

import { atLeast, byId, bytes, count, el, say, seconds } from "./dom.js";
import { PHASES, counts } from "./state.js";

const ROW = 28;
const SPARE = 6;
const COLUMNS = [
  ["name", "Adapter"],
  ["revision", "Serves"],
  ["policy", "Policy"],
  ["size", "Size"],
  [null, "Replicas"],
  ["state", "State"],
  ["requests", "Requests", "Of the fleet, since its replicas' start"],
  ["load", "Load", "A load by the engine takes this long: mean of the fleet, since its replicas' start"],
  ["why", "Reason"],
];

export class Table {
  #rows = [];
  #pool = [];
  #columns = [];
  #standings = [];
  #active = 0;
  #marked = -1;
  #whole = true;
  #grid = byId("grid");
  #scroll = byId("scroll");
  #space = el("div", { class: "space", role: "presentation" });
  #on;
  #heads = [];

  /** `on.open(row)`: details are asked for; `on.sort(key)`; `on.hover(row, replica, event)`. */
  constructor(on) {
    this.#on = on;
    this.#scroll.append(this.#space);
    this.#scroll.addEventListener("scroll", () => this.#draw(), { passive: true });
    new ResizeObserver(() => this.#draw()).observe(this.#scroll);
    this.#grid.addEventListener("keydown", (event) => this.#key(event));
    this.#grid.setAttribute("aria-colcount", COLUMNS.length);
    this.#space.addEventListener("click", (event) => {
      const at = this.#at(event);
      if (at >= 0) {
        this.#move(at);
        this.#on.open(this.#rows[at]);
      }
    });
    this.#space.addEventListener("mousemove", (event) => this.#hover(event));
    this.#space.addEventListener("mouseleave", (event) => this.#on.hover(null, null, event));
    for (const [key, title, about] of COLUMNS) {
      const head = el("div", { role: "columnheader", class: `c-${title.toLowerCase()}` });
      if (key) {
        const button = el("button", { type: "button", tabindex: "-1", title: about }, title);
        button.addEventListener("click", () => this.#on.sort(key));
        head.append(button);
      } else head.append(title);
      this.#heads.push([key, head]);
      byId("head").append(head);
    }
  }

  sorted(key, reversed) {
    for (const [of, head] of this.#heads) {
      if (of === key) head.setAttribute("aria-sort", reversed ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }

  /** Show the fleet's rows. `marked`: the replica that stands out. */
  show(rows, { columns, standings, whole }, marked) {
    this.#standings = standings;
    this.#whole = whole;
    const before = this.#rows[this.#active]?.name;
    this.#rows = rows;
    this.#marked = marked === null ? -1 : columns.indexOf(marked);
    if (columns !== this.#columns) {
      this.#columns = columns;
      const wide = columns.length;
      const cell = wide <= 16 ? 11 : wide <= 32 ? 8 : wide <= 64 ? 6 : wide <= 120 ? 4 : 2;
      this.#grid.style.setProperty("--cell", `${cell}px`);
      this.#grid.style.setProperty("--strip", `${Math.max(76, wide * (cell + 1))}px`);
      for (const one of this.#pool) one.strip.replaceChildren();
    }
    if (this.#rows[this.#active]?.name !== before) {
      const again = before === undefined ? -1 : rows.findIndex((row) => row.name === before);
      this.#active = Math.max(0, again);
    }
    this.#active = Math.min(this.#active, Math.max(0, rows.length - 1));
    this.#space.style.height = `${rows.length * ROW}px`;
    this.#grid.setAttribute("aria-rowcount", rows.length + 1);
    this.#draw();
  }

  focus() {
    this.#grid.focus();
  }

  top() {
    this.#scroll.scrollTop = 0;
    this.#active = 0;
  }

  #draw() {
    const first = Math.max(0, Math.floor(this.#scroll.scrollTop / ROW) - SPARE);
    const many = Math.min(this.#rows.length - first, Math.ceil(this.#scroll.clientHeight / ROW) + 2 * SPARE);
    while (this.#pool.length < many) this.#pool.push(this.#make());
    this.#pool.forEach((one, number) => {
      const shown = number < many;
      if (one.root.hidden === shown) one.root.hidden = !shown;
      if (shown) this.#fill(one, first + number);
    });
    const active = this.#pool.find((one) => !one.root.hidden && one.at === this.#active);
    if (active) this.#grid.setAttribute("aria-activedescendant", active.root.id);
    else this.#grid.removeAttribute("aria-activedescendant");
  }

  #make() {
    const cells = COLUMNS.map(([, title]) => el("div", { role: "gridcell", class: `c-${title.toLowerCase()}` }));
    const strip = el("div", { class: "strip", role: "img" });
    cells[4].append(strip);
    const root = el("div", { class: "row", role: "row", id: `row-${this.#pool.length}` }, ...cells);
    this.#space.append(root);
    return { root, cells, strip, at: -1, drawn: null, marked: -1, whole: true };
  }

  #fill(one, at) {
    const row = this.#rows[at];
    if (one.at !== at) {
      one.at = at;
      one.root.style.transform = `translateY(${at * ROW}px)`;
      one.root.setAttribute("aria-rowindex", at + 2);
    }
    one.root.setAttribute("aria-selected", at === this.#active ? "true" : "false");
    if (one.drawn === row && one.whole === this.#whole && one.marked === this.#marked && one.strip.childElementCount === row.cells.length) return;
    const [name, revision, policy, size, , state, requests, load, why] = one.cells;
    say(name, row.name);
    name.title = row.labels ? `${row.name}\n${row.labels}` : row.name;
    say(revision, row.revision);
    say(policy, row.policy || "default");
    say(size, bytes(row.size));
    say(requests, row.requests === null ? "–" : atLeast(row.requests, this.#whole));
    requests.title = row.errors ? `${count(row.errors)} of them answered with an error` : "";
    requests.classList.toggle("errors", row.errors > 0);
    say(load, seconds(row.load));
    say(why, row.why);
    why.title = row.why;
    const told = stateOf(row);
    if (state.dataset.told !== told.text) {
      state.dataset.told = told.text;
      state.replaceChildren(...told.parts);
    }
    this.#strip(one, row);
    one.strip.setAttribute("aria-label", `on ${row.served} replicas: ${told.text}`);
    one.root.classList.toggle("bad", row.failed > 0);
    one.drawn = row;
    one.whole = this.#whole;
    one.marked = this.#marked;
  }

  #strip(one, row) {
    const children = one.strip.children;
    while (children.length < row.cells.length) one.strip.append(document.createElement("i"));
    while (children.length > row.cells.length) one.strip.lastChild.remove();
    for (let at = 0; at < row.cells.length; at++) {
      const letter = row.cells[at];
      const off = letter !== " " && !counts(letter, this.#standings[at]) ? " off" : "";
      const name = `p${letter === "." ? "E" : letter === " " ? "N" : letter}${off}${at === this.#marked ? " marked" : ""}`;
      if (children[at].className !== name) children[at].className = name;
    }
  }

  #at(event) {
    const root = event.target.closest(".row");
    const one = root && this.#pool.find((each) => each.root === root);
    return one ? one.at : -1;
  }

  #hover(event) {
    const at = this.#at(event);
    const strip = event.target.closest(".strip");
    if (at < 0 || !strip) return this.#on.hover(null, null, event);
    const box = strip.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * this.#columns.length);
    const row = this.#rows[at];
    this.#on.hover(row, this.#columns[column], event, PHASES[row.cells[column]]);
  }

  #key(event) {
    const page = Math.max(1, Math.floor(this.#scroll.clientHeight / ROW) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in steps) {
      event.preventDefault();
      this.#move(this.#active + steps[event.key]);
    } else if (event.key === "Enter" && this.#rows[this.#active]) {
      event.preventDefault();
      this.#on.open(this.#rows[this.#active]);
    }
  }

  #move(to) {
    this.#active = Math.min(Math.max(to, 0), Math.max(0, this.#rows.length - 1));
    const top = this.#active * ROW;
    const height = this.#scroll.clientHeight;
    if (top < this.#scroll.scrollTop) this.#scroll.scrollTop = top;
    else if (top + ROW > this.#scroll.scrollTop + height) this.#scroll.scrollTop = top + ROW - height;
    this.#draw();
  }
}

function stateOf(row) {
  const parts = [];
  const add = (many, what, kind) => {
    if (many) parts.push(el("span", { class: `s-${kind}` }, `${many} ${what}`));
  };
  add(row.failed, "failed", "failed");
  add(row.unknown, "unknown", "unknown");
  add(row.underway, "under way", "underway");
  add(row.draining, "draining", "draining");
  add(row.ready, "ready", "ready");
  if (!parts.length) parts.push(el("span", { class: "s-unloaded" }, "unloaded"));
  return { parts, text: parts.map((part) => part.textContent).join(", ") };
}
