// The fleet as last told: rows by name, a letter for each replica, and how many of which there are.
// Changes come as whole rows; counts follow them and are never taken anew.

export const PHASES = {
  F: "Failed",
  L: "Loading",
  V: "Validating",
  D: "Downloading",
  P: "Pending",
  G: "Draining",
  R: "Ready",
  ".": "Evicted",
  " ": "not served here",
};
const UNDER_WAY = "LVDP";

export const KINDS = {
  failed: { title: "Failed", has: (row) => row.failed > 0 },
  underway: { title: "Under way", has: (row) => row.underway > 0 },
  ready: { title: "Ready", has: (row) => row.ready > 0 },
  draining: { title: "Draining", has: (row) => row.draining > 0 },
  evicted: { title: "Evicted", has: (row) => row.failed + row.underway + row.ready + row.draining === 0 },
};

export const SORTS = {
  name: (a, b) => (a.name < b.name ? -1 : 1),
  revision: (a, b) => a.revision.localeCompare(b.revision, "en", { numeric: true }),
  policy: (a, b) => a.policy.localeCompare(b.policy),
  size: (a, b) => b.size - a.size,
  state: (a, b) => b.failed - a.failed || b.underway - a.underway || b.draining - a.draining || b.ready - a.ready,
  why: (a, b) => (b.why !== "") - (a.why !== "") || a.why.localeCompare(b.why),
};

const SAMPLES = 361;

function rowOf([name, revision, policy, size, rank, labels, cells, why]) {
  let [failed, underway, ready, draining, served] = [0, 0, 0, 0, 0];
  for (let at = 0; at < cells.length; at++) {
    const letter = cells[at];
    if (letter === " ") continue;
    served++;
    if (letter === "R") ready++;
    else if (letter === "F") failed++;
    else if (letter === "G") draining++;
    else if (UNDER_WAY.includes(letter)) underway++;
  }
  const text = `${name} ${revision} ${policy} ${labels} ${why}`.toLowerCase();
  return { name, revision, policy, size, rank, labels, cells, why, failed, underway, ready, draining, served, text };
}

export class Fleet {
  rows = new Map();
  columns = [];
  replicas = new Map();
  samples = [];
  own = "";
  model = "";
  limited = false;
  problem = null;
  kinds = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, 0]));
  columnCounts = [];

  /** Take over an answer; returns the names of rows that are new, other or gone. */
  apply(told) {
    this.own = told.replica;
    this.model = told.model;
    this.limited = told.limited;
    this.problem = told.problem;
    if (told.full) {
      this.rows.clear();
      this.replicas.clear();
      this.samples = [];
      this.columns = told.columns;
      this.columnCounts = told.columns.map(() => ({ R: 0, F: 0, U: 0, G: 0 }));
      for (const kind of Object.keys(KINDS)) this.kinds[kind] = 0;
    }
    const heard = performance.now();
    for (const [id, replica] of Object.entries(told.replicas)) this.replicas.set(id, { ...replica, id, heard });
    for (const id of this.replicas.keys()) if (!this.columns.includes(id)) this.replicas.delete(id);
    const touched = [];
    for (const name of told.gone) {
      if (this.rows.has(name)) {
        this.#count(this.rows.get(name), -1);
        this.rows.delete(name);
        touched.push(name);
      }
    }
    for (const raw of told.rows) {
      const before = this.rows.get(raw[0]);
      if (before) this.#count(before, -1);
      const row = rowOf(raw);
      this.#count(row, 1);
      this.rows.set(row.name, row);
      touched.push(row.name);
    }
    this.samples.push(...told.history);
    if (this.samples.length > SAMPLES) this.samples.splice(0, this.samples.length - SAMPLES);
    return touched;
  }

  #count(row, by) {
    for (const [kind, { has }] of Object.entries(KINDS)) if (has(row)) this.kinds[kind] += by;
    for (let at = 0; at < row.cells.length; at++) {
      const letter = row.cells[at];
      if (letter === "." || letter === " ") continue;
      this.columnCounts[at][UNDER_WAY.includes(letter) ? "U" : letter] += by;
    }
  }

  /** The rows that match, in order. Every word has to be found; `replica`: not evicted there. */
  view({ words, kind, replica, sort, reversed }) {
    const has = kind ? KINDS[kind].has : null;
    const at = replica ? this.columns.indexOf(replica) : -1;
    const found = [];
    for (const row of this.rows.values()) {
      if (has && !has(row)) continue;
      if (at >= 0 && (row.cells[at] === "." || row.cells[at] === " ")) continue;
      if (words.every((word) => row.text.includes(word))) found.push(row);
    }
    const order = SORTS[sort];
    found.sort((a, b) => order(a, b) || SORTS.name(a, b));
    return reversed ? found.reverse() : found;
  }
}
