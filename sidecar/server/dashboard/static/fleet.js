// The gateway's page: its replicas, which of them get requests, and in which order an adapter's go to them.

import { ago, byId, clock, count, el, say } from "./dom.js";
import { Failed, ask, pause } from "./feed.js";
import { drawTiles } from "./tiles.js";
import { followTheme } from "./theme.js";

const LOOK_MS = 1000;
const ANSWER_MS = 5000;
let adapter = new URLSearchParams(location.hash.slice(1)).get("adapter") ?? "";
let heardAt = 0;
let woken = new AbortController();

async function follow() {
  for (;;) {
    const asked = adapter;
    woken = new AbortController();
    try {
      const query = asked ? `?adapter=${encodeURIComponent(asked)}` : "";
      const told = await ask(`/v1/fleet${query}`, AbortSignal.timeout(ANSWER_MS));
      heardAt = Date.now();
      draw(told, asked);
    } catch (error) {
      if (!(error instanceof Failed)) throw error;
      lost(error);
    }
    if (asked === adapter) await pause(LOOK_MS, woken.signal);
  }
}

function draw({ replicas, waiting, problem, order }, asked) {
  state("live", "live", problem && `The gateway has a problem: ${problem}`);
  const all = (name) => replicas.reduce((total, one) => total + one[name], 0);
  const are = (kind) => replicas.filter((one) => one.state === kind).length;
  const away = replicas.length - are("ready");
  drawTiles([
    ["Replicas ready", `${are("ready")} / ${replicas.length}`, away ? "bad" : ""],
    ["Ejected", count(are("ejected")), are("ejected") ? "bad" : ""],
    ["Out", count(are("out")), are("out") ? "bad" : ""],
    ["Requests in flight", count(all("in_flight")), ""],
    ["Adapters loading", count(all("loading")), ""],
    ["Requests that wait for a load", count(waiting), ""],
  ]);
  byId("troubles").hidden = !away && replicas.length > 0;
  const incident = `${count(away)} of ${count(replicas.length)} replicas ${away === 1 ? "gets" : "get"} no requests`;
  say(byId("incident"), replicas.length ? incident : "No replica was found");
  document.title = `${away ? `(${away}) ` : ""}lora-fs gateway`;
  byId("fleet").closest("table").classList.toggle("asked", Boolean(asked));
  drawLines(replicas, order ?? []);
  say(byId("homes"), asked ? homes(asked, order ?? []) : "");
}

function drawLines(replicas, order) {
  const body = byId("fleet");
  replicas.forEach((one, at) => fill(body.children[at] ?? body.appendChild(emptyLine()), one, order.indexOf(one.replica)));
  while (body.children.length > replicas.length) body.lastChild.remove();
}

/** In place: a link keeps its focus, and text that is selected stays so. */
function fill(line, one, place) {
  const [name, state, home, loaded, loading, flight, queue, version, engine, answered, page, why] = line.children;
  line.dataset.state = one.state;
  say(name, one.replica ?? "–");
  say(state.lastChild, one.state + (one.ejected_s === null ? "" : `, ${ago(one.ejected_s)} left`));
  say(home, place < 0 ? "–" : `${place + 1}`);
  say(loaded, one.capacity === null ? count(one.loaded) : `${count(one.loaded)}/${count(one.capacity)}`);
  say(loading, count(one.loading));
  say(flight, count(one.in_flight));
  say(queue, one.queue ? `${count(one.queue.running)} + ${count(one.queue.waiting)}` : "–");
  say(version, one.version ?? "–");
  say(engine, one.engine_version ?? "–");
  say(answered, one.seen_s === null ? "never" : `${ago(one.seen_s)} ago`);
  say(page.firstChild, one.url);
  if (/^https?:/.test(one.url)) page.firstChild.href = one.url;
  say(why, one.why);
}

function emptyLine() {
  const state = el("td", {}, el("b", { class: "dot", "aria-hidden": "true" }), el("span"));
  const figures = Array.from({ length: 7 }, () => el("td"));
  return el("tr", {}, el("th", { scope: "row" }), state, el("td", { class: "home" }), ...figures, el("td", {}, el("a", { rel: "noreferrer" })), el("td"));
}

function homes(name, order) {
  if (!order.length) return `No replica is ready for ${name}.`;
  return `Requests for ${name} go to ${order[0]}${order[1] ? `, and as demand grows to ${order[1]}` : ""}.`;
}

function lost(error) {
  const since = heardAt ? ` since ${clock(heardAt / 1000)}: what is shown was so then` : "";
  const why = error.status ? `This gateway answers ${error.status}: ${error.message}` : "This gateway does not answer";
  state("lost", error.status ? `answers ${error.status}` : "no answer", `${why}${since}.`);
}

function state(kind, text, problem) {
  byId("live").dataset.state = kind;
  say(byId("live-text"), text);
  byId("problem").hidden = !problem;
  say(byId("problem"), problem);
}

byId("search").value = adapter;
byId("search").addEventListener("input", (event) => {
  adapter = event.target.value.trim();
  history.replaceState(null, "", adapter ? `#${new URLSearchParams({ adapter })}` : location.pathname);
  woken.abort();
});

followTheme();
follow();
