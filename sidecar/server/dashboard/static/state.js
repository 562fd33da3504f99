// The fleet as last told: rows by name, a letter for each replica, and how many of which there are.
// Changes come as whole rows; counts follow them, and are taken anew where a replica went or came back.
// What a replica says is counted while it is so: of a silent one nothing, of one without its engine failures.

export const PHASES = {
  F: "Failed",
  L: "Loading",
  V: "Validating",
  D: "Downloading",
  P: "Pending",
  G: "Draining",
  R: "Ready",
  ".": "Unloaded",
  " ": "not served here",
};
const UNDER_WAY = "LVDP";

export const KINDS = {
  failed: { title: "Failed", has: (row) => row.failed > 0 },
  underway: { title: "Under way", has: (row) => row.underway > 0 },
  ready: { title: "Ready", has: (row) => row.ready > 0 },
  draining: { title: "Draining", has: (row) => row.draining > 0 },
  unloaded: { title: "Unloaded", has: (row) => row.failed + row.underway + row.ready + row.draining + row.unknown === 0 },
  unknown: { title: "Unknown", has: (row) => row.unknown > 0 },
};

export const SORTS = {
  name: (a, b) => (a.name < b.name ? -1 : 1),
  revision: (a, b) => a.revision.localeCompare(b.revision, "en", { numeric: true }),
  policy: (a, b) => a.policy.localeCompare(b.policy),
  size: (a, b) => b.size - a.size,
  state: (a, b) =>
    b.failed - a.failed || b.unknown - a.unknown || b.underway - a.underway || b.draining - a.draining || b.ready - a.ready,
  requests: (a, b) => (b.requests ?? -1) - (a.requests ?? -1),
  load: (a, b) => (b.load ?? -1) - (a.load ?? -1),
  why: (a, b) => (b.why !== "") - (a.why !== "") || a.why.localeCompare(b.why),
};

const SAMPLES = 361;

/** What a replica's words are worth: "ready", "down" without its engine, "stale" without a report. */
export function standing(replica) {
  if (!replica?.live) return "stale";
  return replica.engine === "ready" ? "ready" : "down";
}

/** Whether a cell is so now, on a replica of that standing. */
export const counts = (letter, stands) => stands === "ready" || (stands === "down" && letter === "F");

function tally(cells, standings) {
  let [failed, underway, ready, draining, unknown, served] = [0, 0, 0, 0, 0, 0];
  for (let at = 0; at < cells.length; at++) {
    const letter = cells[at];
    if (letter === " ") continue;
    served++;
    if (!counts(letter, standings[at])) unknown += letter === "." ? 0 : 1;
    else if (letter === "R") ready++;
    else if (letter === "F") failed++;
    else if (letter === "G") draining++;
    else if (UNDER_WAY.includes(letter)) underway++;
  }
  return { failed, underway, ready, draining, unknown, served };
}

/** A row's last three values: requests, those answered with an error, mean seconds of a load; null: none counted. */
function rowOf([name, revision, policy, size, rank, labels, cells, why, requests, errors, load], standings) {
  const text = `${name} ${revision} ${policy} ${labels} ${why}`.toLowerCase();
  return { name, revision, policy, size, rank, labels, cells, why, requests, errors, load, text, ...tally(cells, standings) };
}

export class Fleet {
  rows = new Map();
  columns = [];
  replicas = new Map();
  samples = [];
  own = "";
  model = "";
  limited = false;
  known = false;
  whole = true; // no replica has more counts than its report takes
  problem = null;
  kinds = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, 0]));
  columnCounts = [];
  standings = [];

  /** Take over an answer; returns the names of rows that are new, other or gone. */
  apply(told) {
    this.own = told.replica;
    this.model = told.model;
    this.limited = told.limited;
    this.known = told.known;
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
    this.whole = [...this.replicas.values()].every((replica) => replica.usage_whole);
    this.#stand();
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
      const row = rowOf(raw, this.standings);
      this.#count(row, 1);
      this.rows.set(row.name, row);
      touched.push(row.name);
    }
    this.samples.push(...told.history);
    if (this.samples.length > SAMPLES) this.samples.splice(0, this.samples.length - SAMPLES);
    return touched;
  }

  #stand() {
    const now = this.columns.map((id) => standing(this.replicas.get(id)));
    const same = now.length === this.standings.length && now.every((one, at) => one === this.standings[at]);
    this.standings = now;
    if (same) return;
    for (const [name, row] of this.rows) {
      this.#count(row, -1);
      const again = { ...row, ...tally(row.cells, now) };
      this.#count(again, 1);
      this.rows.set(name, again);
    }
  }

  #count(row, by) {
    for (const [kind, { has }] of Object.entries(KINDS)) if (has(row)) this.kinds[kind] += by;
    for (let at = 0; at < row.cells.length; at++) {
      const letter = row.cells[at];
      if (letter === "." || letter === " ") continue;
      this.columnCounts[at][UNDER_WAY.includes(letter) ? "U" : letter] += by;
    }
  }

  /** The rows that match, in order. Every word has to be found; `replica`: not unloaded there. */
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
