// What stands around the table: tiles, chips, replicas, downloads.

import { ago, byId, bytes, count, el, percent, say, seconds } from "./dom.js";
import { KINDS, standing } from "./state.js";
import { drawTiles } from "./tiles.js";

export function drawFleetTiles(fleet) {
  const replicas = [...fleet.replicas.values()];
  const live = replicas.filter((replica) => replica.live);
  const ready = live.filter((replica) => standing(replica) === "ready").length;
  const own = fleet.replicas.get(fleet.own)?.figures ?? {};
  const all = (name) => live.reduce((total, replica) => total + (replica.figures[name] ?? 0), 0);
  const [hits, misses] = [all("request_hits"), all("request_misses")];
  const told = [
    ["Adapters", count(fleet.rows.size), ""],
    ["Replicas ready", `${ready} / ${fleet.columns.length}`, ready < fleet.columns.length ? "bad" : ""],
    ["Failing", count(fleet.kinds.failed), fleet.kinds.failed ? "bad" : ""],
    ["Under way", count(fleet.kinds.underway), ""],
    ["Requests in flight", fleet.limited ? "–" : count(all("in_flight")), ""],
    ["Hit rate: fleet, since start", percent(hits, hits + misses), ""],
    ["Median load: this replica", seconds(own.load_s), ""],
  ];
  drawTiles(told);
}

/** `on(id)`: a replica was picked. */
export function drawReplicas(fleet, picked, on) {
  const body = byId("replicas");
  fleet.columns.forEach((id, at) => {
    const replica = fleet.replicas.get(id);
    if (!replica) return;
    const line = body.children[at] ?? body.appendChild(replicaLine(on));
    const button = line.querySelector("button");
    line.dataset.id = id;
    const stands = standing(replica);
    line.dataset.state = stands;
    say(button.querySelector("span"), id);
    const says = { stale: "no report in the last minute", down: "engine not ready", ready: "ready" }[stands];
    button.title = says;
    button.setAttribute("aria-pressed", picked === id ? "true" : "false");
    line.classList.toggle("own", replica.own);
    const [, loaded, gpu, host, disk, hits, load, seen] = line.children;
    const counted = fleet.columnCounts[at];
    const failed = stands === "stale" ? 0 : counted.F;
    button.setAttribute("aria-label", `${id}: ${says}${replica.own ? ", this one" : ""}, ${failed} failed. Show what is there`);
    const figures = stands === "ready" ? replica.figures : {};
    const tier = (name) => (figures[`tier_${name}`] === undefined ? "–" : count(figures[`tier_${name}`]));
    say(loaded, stands !== "ready" ? "–" : figures.capacity ? `${counted.R}/${figures.capacity}` : `${counted.R}`);
    say(gpu, tier("gpu"));
    say(host, tier("host"));
    say(disk, tier("disk"));
    say(line.querySelector("em"), failed ? count(failed) : "");
    line.querySelector("em").title = failed ? `${failed} cannot be loaded there` : "";
    say(hits, percent(figures.request_hits ?? 0, (figures.request_hits ?? 0) + (figures.request_misses ?? 0)));
    say(load, seconds(figures.load_s));
    say(seen, replica.own ? "here" : ago(ageOf(replica)));
  });
  while (body.children.length > fleet.columns.length) body.lastChild.remove();
}

function replicaLine(on) {
  const button = el("button", { type: "button" }, el("b", { class: "dot", "aria-hidden": "true" }), el("span"), el("em"));
  const line = el("tr", {}, el("th", { scope: "row" }, button), ...Array.from({ length: 7 }, () => el("td")));
  button.addEventListener("click", () => on(line.dataset.id));
  return line;
}

function ageOf(replica) {
  if (replica.at === null) return NaN;
  return Date.now() / 1000 - replica.at;
}

/** What is fetched anywhere, to be registered. */
export function drawDownloads(fleet) {
  const all = [...fleet.replicas.values()].flatMap((replica) => (replica.live ? replica.downloads.map((one) => [replica.id, one]) : []));
  byId("downloads-section").hidden = !all.length;
  const lines = byId("downloads");
  all.forEach(([replica, one], at) => {
    const line = lines.children[at] ?? lines.appendChild(el("li", {}, el("strong"), el("span"), el("progress", { max: 1 })));
    const [name, told, bar] = line.children;
    const size = one.size_bytes ? ` of ${bytes(one.size_bytes)}` : "";
    say(name, one.name);
    say(told, one.phase === "Downloading" ? `${bytes(one.received_bytes) || "0 B"}${size} · ${replica}` : `${one.phase.toLowerCase()} · ${replica}`);
    line.title = one.source;
    bar.setAttribute("aria-label", `download of ${one.name}`);
    if (one.size_bytes) bar.value = Math.min(1, one.received_bytes / one.size_bytes);
    else bar.removeAttribute("value");
  });
  while (lines.children.length > all.length) lines.lastChild.remove();
}

/** The buttons that narrow the table to a kind. */
export function drawChips(fleet, kind, on) {
  const chips = byId("chips");
  const all = [["", "All", fleet.rows.size], ...Object.entries(KINDS).map(([key, { title }]) => [key, title, fleet.kinds[key]])];
  all.forEach(([key, title, many], at) => {
    let chip = chips.children[at];
    if (!chip) {
      chip = el("button", { type: "button", class: `k-${key || "all"}` }, el("span", {}, title), el("b"));
      chip.addEventListener("click", () => on(key));
      chips.append(chip);
    }
    chip.setAttribute("aria-pressed", kind === key ? "true" : "false");
    say(chip.lastChild, count(many));
    chip.disabled = !many && key !== kind;
    chip.hidden = key === "unknown" && chip.disabled;
  });
}
