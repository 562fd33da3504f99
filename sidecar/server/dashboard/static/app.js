// The page: what is asked for, what comes, and who draws it. Drawn at most once a frame.

import { drawBanners } from "./banners.js";
import { drawDetails, readDetails } from "./details.js";
import { byId, clock, count, say } from "./dom.js";
import { followEvents } from "./events.js";
import { Failed, follow, token } from "./feed.js";
import { Plots } from "./plot.js";
import { drawChips, drawDownloads, drawFleetTiles, drawReplicas } from "./side.js";
import { Fleet, KINDS, SORTS, standing } from "./state.js";
import { Table } from "./table.js";
import { followTheme } from "./theme.js";

const QUIET_MS = 30000;
const fleet = new Fleet();
const plots = new Plots();
const table = new Table({ open, sort, hover });
const FIRST = "state"; // what fails stands first
const asked = { text: "", words: [], kind: "", replica: null, sort: FIRST, reversed: false, open: null };
let running = new AbortController();
let heardAt = 0;
let lostBy = null; // the last read that failed, while none succeeded since
let state = "waiting";
let due = false;
let failing = null;
let opening = new AbortController(); // ends when its adapter is closed
let detailsDue = 0;
let detailsDrawn = 0;
let detailsLost = false;

// -- what comes ----------------------------------------------------------------------------------

const on = {
  data(told) {
    heardAt = Date.now();
    lostBy = null;
    if (detailsLost) details();
    if (!told) return live(seen());
    performance.mark("lora-fs:told");
    const touched = fleet.apply(told);
    live(seen());
    if (told.history.length || told.full) plots.draw(fleet.samples);
    if (asked.open && (told.full || touched.includes(asked.open))) details();
    announce();
    draw();
  },
  lost(error) {
    lostBy = error;
    live("lost");
  },
  refused() {
    live(token.get() ? "wrong" : "refused");
    if (!byId("token").open) byId("token").showModal();
  },
};

function start() {
  running.abort();
  running = new AbortController();
  live("waiting");
  follow(on, running.signal);
  followEvents(running.signal);
}

function announce() {
  const many = fleet.kinds.failed;
  if (failing !== null && many !== failing) {
    say(byId("said"), many > failing ? `${many - failing} more adapters are failing: ${many} in all` : `${many} adapters are failing`);
  }
  failing = many;
}

/** What an answer shows: all that the caller may see, or what is public for want of a token. */
function seen() {
  if (!fleet.limited || fleet.known) return "live";
  return token.get() ? "wrong" : "public";
}

function live(now) {
  state = now;
  byId("live").dataset.state = state;
  const quiet = heardAt ? `no answer for ${Math.round((Date.now() - heardAt) / 1000)} s` : "no answer";
  const lost = lostBy?.status ? `answers ${lostBy.status}` : quiet;
  const texts = { live: "live", lost, refused: "a token is needed", wrong: "wrong token", public: "public only", waiting: "connecting" };
  say(byId("live-text"), texts[state]);
  problems();
}

function problems() {
  const since = heardAt ? ` since ${clock(heardAt / 1000)}: what is shown was so then` : "";
  const told = {
    lost: `${without(lostBy)}${since}.`,
    refused: "These adapters are not public: give a token that may read.",
    wrong: `This sidecar does not know the token${fleet.own ? ": public namespaces alone are shown" : ""}. Give another one.`,
    public: "Public namespaces are shown. A token shows those it may read.",
  };
  const text = [told[state], fleet.problem].filter(Boolean).join(" · ");
  byId("problem").hidden = !text;
  say(byId("problem"), text);
}

/** What a failed read means. */
function without(error) {
  return error?.status ? `This sidecar answers ${error.status}: ${error.message}` : "This sidecar does not answer";
}

function nothing() {
  if (fleet.rows.size) return "Nothing matches.";
  if (state === "wrong") return "Nothing is public here, and the token is not known.";
  if (fleet.limited) return fleet.known ? "This token may read no adapter that is registered." : "Nothing is public here. A token shows what it may read.";
  return "No adapter is registered. lora-fs register NAME FOLDER registers one.";
}

// -- what is drawn -------------------------------------------------------------------------------

function draw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    const rows = fleet.view(asked);
    table.show(rows, fleet, asked.replica);
    drawBanners(fleet);
    drawFleetTiles(fleet);
    drawChips(fleet, asked.kind, (kind) => change({ kind }));
    drawReplicas(fleet, asked.replica, pick);
    drawDownloads(fleet);
    say(byId("where"), [fleet.model, fleet.own].filter(Boolean).join(" · "));
    say(byId("hour-of"), fleet.own);
    document.title = `${fleet.kinds.failed ? `(${fleet.kinds.failed}) ` : ""}lora-fs · ${fleet.model}`;
    const narrowed = asked.words.length || asked.kind || asked.replica;
    say(byId("shown"), narrowed ? `${count(rows.length)} of ${count(fleet.rows.size)}` : "");
    byId("empty").hidden = rows.length > 0 || !fleet.own;
    say(byId("empty"), nothing());
    problems();
    requestAnimationFrame(() => {
      performance.mark("lora-fs:drawn");
      document.documentElement.dataset.drawn = fleet.rows.size;
    });
  });
}

function change(asks) {
  Object.assign(asked, asks);
  asked.words = asked.text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!("open" in asks)) table.top();
  table.sorted(asked.sort, asked.reversed);
  const kept = new URLSearchParams();
  for (const name of ["text", "kind", "replica"]) if (asked[name]) kept.set(name, asked[name]);
  if (asked.sort !== FIRST || asked.reversed) kept.set("sort", `${asked.reversed ? "-" : ""}${asked.sort}`);
  if (asked.open) kept.set("adapter", asked.open);
  history.replaceState(null, "", kept.size ? `#${kept}` : location.pathname);
  draw();
}

function pick(id) {
  change({ replica: asked.replica === id ? null : id });
}

function sort(key) {
  change({ sort: key, reversed: asked.sort === key && !asked.reversed });
}

function hover(row, replica, event, phase) {
  const tip = byId("tip");
  tip.hidden = !row;
  if (!row) return;
  const was = { stale: ", as last reported", down: ", its engine is not ready", ready: "" };
  say(tip, `${replica}: ${phase}${was[standing(fleet.replicas.get(replica))]}`);
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 16}px`;
}

// -- details -------------------------------------------------------------------------------------

function open(row) {
  opening.abort();
  opening = new AbortController();
  change({ open: row.name });
  say(byId("details-title"), row.name);
  byId("details-body").replaceChildren();
  show(true);
  const { signal } = opening;
  details().then(() => signal.aborted || byId("details-title").focus());
}

function show(open) {
  byId("details").hidden = !open;
  byId("overview").hidden = open;
}

/** Read and draw the open adapter. Nothing is drawn once it is closed, nor an older answer after a newer. */
async function details() {
  const name = asked.open;
  const mine = ++detailsDue;
  const signal = AbortSignal.any([running.signal, opening.signal]);
  detailsLost = false;
  try {
    const told = await readDetails(name, signal);
    if (signal.aborted || mine < detailsDrawn) return;
    detailsDrawn = mine;
    drawDetails(name, told, fleet);
  } catch (error) {
    if (!(error instanceof Failed)) throw error;
    if (mine !== detailsDue || signal.aborted) return;
    detailsLost = error.status !== 404;
    const why = error.isRefused ? `A token is needed: ${error.message}` : without(error);
    say(byId("details-body"), detailsLost ? why : "It is not registered any more.");
  }
}

function close() {
  if (!asked.open) return;
  opening.abort();
  detailsLost = false;
  show(false);
  change({ open: null });
  table.focus();
}

// -- the page itself -----------------------------------------------------------------------------

byId("search").addEventListener("input", (event) => change({ text: event.target.value }));
byId("search").addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "Enter") (event.preventDefault(), table.focus());
});
byId("details-close").addEventListener("click", close);
document.addEventListener("keydown", (event) => {
  if (event.target.closest("dialog")) return;
  if (event.key === "/" && !event.target.closest("input")) (event.preventDefault(), byId("search").select());
  if (event.key === "Escape") {
    if (asked.open) close();
    else if (asked.text || asked.kind || asked.replica) {
      byId("search").value = "";
      change({ text: "", kind: "", replica: null });
    }
  }
});

byId("token-open").addEventListener("click", () => {
  byId("token-value").value = token.get();
  byId("token").showModal();
});
byId("token-cancel").addEventListener("click", () => byId("token").close());
for (const [id, value] of [["token-use", () => byId("token-value").value.trim()], ["token-forget", () => ""]]) {
  byId(id).addEventListener("click", (event) => {
    event.preventDefault();
    token.set(value());
    byId("token-value").value = "";
    byId("token").close();
    start();
  });
}

setInterval(() => {
  if (fleet.own) drawReplicas(fleet, asked.replica, pick); // their ages
  if (heardAt && Date.now() - heardAt > QUIET_MS) live("lost");
}, 5000);

followTheme();
const kept = new URLSearchParams(location.hash.slice(1));
if (kept.get("kind") === "evicted") kept.set("kind", "unloaded"); // what it was called before
const [, minus, by] = /^(-?)(\w*)$/.exec(kept.get("sort") ?? "") ?? [];
byId("search").value = kept.get("text") ?? "";
change({
  text: kept.get("text") ?? "",
  kind: kept.get("kind") in KINDS ? kept.get("kind") : "",
  replica: kept.get("replica"),
  open: kept.get("adapter"),
  sort: by in SORTS ? by : FIRST,
  reversed: minus === "-",
});
if (asked.open) show(true);
start();
