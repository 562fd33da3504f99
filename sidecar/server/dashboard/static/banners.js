// What is wrong with the replicas, in sentences: what it is, where, and since when.

import { byId, clock, count, el } from "./dom.js";
import { standing } from "./state.js";

const NAMED = 3; // replicas in a sentence
const TITLES = { EngineUnavailable: "Engine unreachable" };
const STOPS = new Set(["EngineUnavailable", "EngineNotReady", "RegistryMissing", "Silent", "VolumeStalled", "VolumeUnavailable"]);

/** One trouble a kind, the worst first: `{kind, stops, text}`. */
export function troublesOf(fleet) {
  const kinds = new Map();
  const add = (kind, replica, since, message = "") => {
    const one = kinds.get(kind) ?? { replicas: new Set(), since: Infinity, messages: new Set() };
    one.replicas.add(replica.id);
    one.since = Math.min(one.since, since ?? Infinity);
    if (message) one.messages.add(message);
    kinds.set(kind, one);
  };
  for (const id of fleet.columns) {
    const replica = fleet.replicas.get(id);
    if (!replica) continue;
    if (!replica.live) {
      add("Silent", replica, replica.at);
      continue;
    }
    for (const condition of replica.conditions) {
      const [, kind, message] = /^([^:]*):? ?(.*)$/s.exec(condition);
      add(kind, replica, replica.conditions_since[kind], message);
    }
    if (standing(replica) === "down" && !replica.conditions.length) add("EngineNotReady", replica, null);
  }
  const told = [...kinds].map(([kind, one]) => ({ kind, stops: STOPS.has(kind), text: sentence(kind, one) }));
  return told.sort((a, b) => b.stops - a.stops || (a.kind < b.kind ? -1 : 1));
}

function sentence(kind, { replicas, since, messages }) {
  const [first, ...others] = messages;
  const named = [...replicas].slice(0, NAMED).join(", ");
  const where = replicas.size > NAMED ? `${named} and ${replicas.size - NAMED} more` : named;
  const when = since < Infinity ? ` since ${clock(since)}` : "";
  if (kind === "Silent") return `No report from ${where}${when}: what ${replicas.size > 1 ? "they hold" : "it holds"} is not known`;
  const words = kind.replace(/(?<!^)([A-Z])/g, (letter) => ` ${letter.toLowerCase()}`);
  const why = first ? `: ${first}${others.length ? ` (and ${others.length} more)` : ""}` : "";
  return `${TITLES[kind] ?? words} on ${where}${when}${why}`;
}

export function drawBanners(fleet) {
  const troubles = troublesOf(fleet);
  const away = fleet.standings.filter((one) => one !== "ready").length;
  const failing = fleet.kinds.failed;
  const incident = [
    away && `${count(away)} of ${count(fleet.columns.length)} replicas not ready`,
    failing && `${count(failing)} ${failing === 1 ? "adapter" : "adapters"} failing`,
  ].filter(Boolean);
  const said = [incident.join(" · "), ...troubles.map((one) => one.text)].join("\n");
  const box = byId("troubles");
  box.hidden = !incident.length && !troubles.length;
  if (box.dataset.said === said) return;
  box.dataset.said = said;
  byId("incident").textContent = incident.join(" · ");
  byId("banners").replaceChildren(...troubles.map((one) => el("li", { class: one.stops ? "stops" : "note" }, one.text)));
}
