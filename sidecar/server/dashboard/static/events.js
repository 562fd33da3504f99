// This replica's events: those of one reason in one line, and each adapter that fails in its own.

import { ago, byId, el } from "./dom.js";
import { ask } from "./feed.js";

const EVENTS_MS = 5000;
const SHOWN = 100;
const NAMED = 3;

/** Events, where the sidecar tells of them; asked for again every few seconds. */
export async function followEvents(signal) {
  while (!signal.aborted) {
    try {
      const told = await ask("/v1/events", signal);
      if (told) drawEvents(told.data ?? []);
    } catch {
      // none are told here, or not now: those shown stay
    }
    await new Promise((resolve) => setTimeout(resolve, EVENTS_MS));
  }
}

/** Lines of events, the newest first: what is normal by its reason, a failure by its adapter, too. */
export function grouped(events) {
  const groups = new Map();
  for (const one of [...events].sort((a, b) => (a.last_at < b.last_at ? 1 : -1))) {
    const name = one.key?.at(-1) ?? "";
    const key = one.type === "Warning" ? `${one.reason} ${name}` : one.reason;
    const group = groups.get(key) ?? { ...one, count: 0, names: new Set() };
    group.count += one.count;
    if (name) group.names.add(name);
    groups.set(key, group);
  }
  return [...groups.values()];
}

function drawEvents(events) {
  byId("events-section").hidden = false;
  const lines = grouped(events).slice(0, SHOWN).map((one) => {
    const names = [...one.names];
    const about = names.length > NAMED ? `${names.slice(0, NAMED).join(", ")} and ${names.length - NAMED} more` : names.join(", ");
    const many = one.count > 1 ? ` ×${one.count}` : "";
    const at = el("time", { datetime: one.last_at, title: one.last_at }, ago((Date.now() - Date.parse(one.last_at)) / 1000));
    const message = names.length > 1 ? "" : one.message;
    return el("li", { class: one.type === "Warning" ? "warning" : "" }, at, el("strong", {}, one.reason + many), ` ${about} `, el("span", {}, message));
  });
  byId("events").replaceChildren(...(lines.length ? lines : [el("li", { class: "none" }, "none")]));
}
