// The page: what is asked for, what comes, and who draws it. Drawn at most once a frame.

import { byId, count, say } from "./dom.js";
import { Refused, follow, token } from "./feed.js";
import { Plots } from "./plot.js";
import { drawChips, drawDetails, drawDownloads, drawReplicas, drawTiles, followEvents } from "./side.js";
import { Fleet, KINDS, SORTS } from "./state.js";
import { Table } from "./table.js";

const QUIET_MS = 30000;
const fleet = new Fleet();
const plots = new Plots();
const table = new Table({ open, sort, hover });
const asked = { text: "", words: [], kind: "", replica: null, sort: "name", reversed: false, open: null };
let running = new AbortController();
let heardAt = 0;
let due = false;
let failing = null;
let detailsDue = 0;

// -- what comes ----------------------------------------------------------------------------------

const on = {
  data(told) {
    heardAt = performance.now();
    live("live");
    if (!told) return;
    performance.mark("lora-fs:told");
    const touched = fleet.apply(told);
    if (told.history.length || told.full) plots.draw(fleet.samples);
    if (asked.open && (told.full || touched.includes(asked.open))) details();
    announce();
    draw();
  },
  lost() {
    live("lost");
  },
  refused() {
    live("refused");
    problem("These adapters are not public: give a token that may read.");
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

function live(state) {
  byId("live").dataset.state = state;
  const lost = heardAt ? `no answer for ${Math.round((performance.now() - heardAt) / 1000)} s` : "no answer";
  const texts = { live: "live", lost, refused: "a token is needed", waiting: "connecting" };
  say(byId("live-text"), texts[state]);
}

function problem(text) {
  byId("problem").hidden = !text;
  say(byId("problem"), text ?? "");
}

// -- what is drawn -------------------------------------------------------------------------------

function draw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    const rows = fleet.view(asked);
    table.show(rows, fleet.columns, asked.replica);
    drawTiles(fleet);
    drawChips(fleet, asked.kind, (kind) => change({ kind }));
    drawReplicas(fleet, asked.replica, pick);
    drawDownloads(fleet);
    say(byId("where"), [fleet.model, fleet.own].filter(Boolean).join(" · "));
    say(byId("hour-of"), fleet.own);
    document.title = `${fleet.kinds.failed ? `(${fleet.kinds.failed}) ` : ""}lora-fs · ${fleet.model}`;
    const narrowed = asked.words.length || asked.kind || asked.replica;
    say(byId("shown"), narrowed ? `${count(rows.length)} of ${count(fleet.rows.size)}` : "");
    const nothing = fleet.rows.size ? "Nothing matches." : "No adapter is registered. lora-fs register NAME FOLDER registers one.";
    byId("empty").hidden = rows.length > 0 || !fleet.own;
    say(byId("empty"), nothing);
    problem(fleet.problem ?? (fleet.limited && !token.get() ? "Public namespaces are shown. A token shows those it may read." : null));
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
  if (asked.sort !== "name" || asked.reversed) kept.set("sort", `${asked.reversed ? "-" : ""}${asked.sort}`);
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
  say(tip, `${replica}: ${phase}`);
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 16}px`;
}

// -- details -------------------------------------------------------------------------------------

function open(row) {
  change({ open: row.name });
  say(byId("details-title"), row.name);
  byId("details-body").replaceChildren();
  show(true);
  details().then(() => byId("details-title").focus());
}

function show(open) {
  byId("details").hidden = !open;
  byId("overview").hidden = open;
}

async function details() {
  const mine = ++detailsDue;
  try {
    await drawDetails(asked.open, fleet, running.signal);
  } catch (error) {
    if (mine === detailsDue && !running.signal.aborted) {
      say(byId("details-body"), error instanceof Refused ? "A token is needed." : "It is not registered any more.");
    }
  }
}

function close() {
  if (!asked.open) return;
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
byId("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
  theme(dark ? "light" : "dark");
});
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

function theme(kind) {
  if (kind) localStorage.setItem("lora-fs-theme", kind);
  document.documentElement.dataset.theme = localStorage.getItem("lora-fs-theme") ?? "";
}

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
    problem(null);
    start();
  });
}

setInterval(() => {
  if (fleet.own) drawReplicas(fleet, asked.replica, pick); // their ages
  if (heardAt && performance.now() - heardAt > QUIET_MS) live("lost");
}, 5000);

theme();
const kept = new URLSearchParams(location.hash.slice(1));
const [, minus, by] = /^(-?)(\w*)$/.exec(kept.get("sort") ?? "") ?? [];
byId("search").value = kept.get("text") ?? "";
change({
  text: kept.get("text") ?? "",
  kind: kept.get("kind") in KINDS ? kept.get("kind") : "",
  replica: kept.get("replica"),
  open: kept.get("adapter"),
  sort: by in SORTS ? by : "name",
  reversed: minus === "-",
});
if (asked.open) show(true);
start();
