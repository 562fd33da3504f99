// One adapter in full: its record, its canary, every replica, its revisions over time, commands to copy.

import { ago, atLeast, byId, bytes, clock, count, el, percent, say, seconds } from "./dom.js";
import { ask } from "./feed.js";
import { counts, standing } from "./state.js";

/** Read one adapter, on every replica. Throws Failed if it cannot be read. */
export function readDetails(name, signal) {
  return ask(`/v1/dashboard/adapters/${name.split("/").map(encodeURIComponent).join("/")}`, signal);
}

/** Draw what `readDetails` read. */
export function drawDetails(name, told, fleet) {
  const { record, residency } = told;
  const { spec } = record;
  say(byId("details-title"), name);
  const held = residency && [residency.tier ?? "in the engine", `${residency.in_flight} in flight`, `idle ${ago(residency.idle_s)}`].join(", ");
  const facts = [
    ["Serves", `${record.revision}, generation ${record.generation}`],
    ["Here", held ?? (told.staged ? "staged on disk" : "not loaded")],
    ["Base model", spec.base_model],
    ["Policy", spec.policy ? `${spec.policy.kind}${spec.policy.kind === "lazy" ? `, ${ago(spec.policy.ttl_s)} idle` : ""}${spec.policy.priority ? `, priority ${spec.policy.priority}` : ""}` : "the replica's default"],
    ["Size", `${bytes(spec.size_bytes)} in ${spec.files.length} files`],
    ["LoRA", `rank ${spec.lora.rank}, alpha ${spec.lora.alpha}, ${spec.lora.dtype}`],
    ["Modules", spec.lora.target_modules.join(" ")],
    ["Labels", Object.entries(spec.labels).map(([key, value]) => `${key}=${value}`).join(" ")],
    ["Source", spec.source.uri],
    ["Digest", spec.digest],
    ["Signed by", spec.signer],
    ["Effect", effectOf(Object.entries(told.replicas))],
    ["Written", `${record.updated_at} by ${record.writer}`],
  ].filter(([, value]) => value);
  const list = el("dl", {}, ...facts.flatMap(([title, value]) => [el("dt", {}, title), el("dd", {}, value)]));
  const lines = fleet.columns.map((id) => {
    const one = told.replicas[id];
    const phase = one?.phase ?? "Unloaded";
    const stands = standing(fleet.replicas.get(id));
    const now = counts(phase === "Failed" ? "F" : "", stands) ? phase : one ? `${phase}, not known now` : "Not known";
    const absent = { stale: "no report in the last minute", down: "its engine is not ready", ready: "loads at the first request" };
    const why = one ? [one.reason, one.message].filter(Boolean).join(": ") : absent[stands];
    const again = one?.retry_in_s ? `; again in ${Math.round(one.retry_in_s)} s` : "";
    return el("tr", { class: now === phase ? `d-${phase.toLowerCase()}` : "d-unknown" }, el("th", { scope: "row" }, id), el("td", {}, el("b", { class: "dot", "aria-hidden": "true" }), now), el("td", {}, progressOf(why), why + again));
  });
  const head = el("thead", {}, el("tr", {}, ...["Replica", "Phase", "Why"].map((title) => el("th", { scope: "col" }, title))));
  const everywhere = el("table", {}, head, el("tbody", {}, ...lines));
  const parts = [list, ...laneOf(told), el("h3", {}, "Replicas"), everywhere, ...historyOf(told)];
  redraw(byId("details-body"), parts, commandsFor(record, told.revisions));
}

/** Draw the parts anew. Commands that are the same stay: a button keeps its focus and says that it copied. */
function redraw(body, parts, commands) {
  const shown = body.querySelector(".commands");
  if (shown?.dataset.told !== commands.dataset.told) return body.replaceChildren(...parts, commands);
  while (body.firstChild !== shown) body.firstChild.remove();
  shown.before(...parts);
}

/** What the replicas found out about the bytes that serve; nothing where none of them looked. */
function effectOf(replicas) {
  const by = (kind) => replicas.filter(([, one]) => one.effect === kind).map(([id]) => id).join(", ");
  const parts = [by("none") && `none: it answers as the base model does (${by("none")})`, by("some") && `it changes answers (${by("some")})`];
  return parts.filter(Boolean).join("; ");
}

function progressOf(text) {
  const found = /(\d+(?:\.\d+)?) ?%/.exec(text);
  return found ? el("progress", { max: 100, value: found[1], "aria-label": "downloaded" }) : null;
}

/** A revision's requests in the fleet, since its replicas' start. */
function requestsOf(one, whole) {
  return one.requests === null ? "requests not counted" : `${atLeast(one.requests, whole)} ${one.requests === 1 ? "request" : "requests"}`;
}

function errorsOf(one) {
  const all = one.errors_4xx + one.errors_5xx;
  if (!all) return one.requests === null ? "" : "no errors";
  const kinds = [one.errors_4xx && `${count(one.errors_4xx)} of 4xx`, one.errors_5xx && `${count(one.errors_5xx)} of 5xx`];
  return `${count(all)} ${all === 1 ? "error" : "errors"} (${percent(all, one.requests)}): ${kinds.filter(Boolean).join(", ")}`;
}

/** What serves and what is tried beside it: the share of each, its requests and errors in the fleet. */
function laneOf({ revisions, usage_whole: whole }) {
  const serves = revisions.find((one) => one.role === "serves");
  const canary = revisions.find((one) => one.role === "canary");
  if (!serves || !canary) return [];
  const side = (one, kind) =>
    el("div", { class: kind }, el("strong", {}, `${one.revision} · ${one.share} %`), el("span", {}, requestsOf(one, whole)), el("em", { class: one.errors_4xx + one.errors_5xx ? "errors" : "" }, errorsOf(one)));
  const bar = el("progress", { max: 100, value: canary.share, "aria-label": `share of ${canary.revision}` });
  const title = el("h3", {}, `Canary: ${serves.revision} → ${canary.revision}`);
  return [title, el("div", { class: "lane" }, side(serves, "serves"), bar, side(canary, "canary"))];
}

const FIGURES = ["pass_rate", "score", "errors", "regressions", "improvements", "p_worse", "ttft_p99_ms"];

/** The newest evaluation of a revision: its gate, its cases and its figures. */
function evaluationOf({ role, evaluation, evaluation_problem: problem }, known) {
  if (role === "withdrawn") return null;
  if (problem || !known) return el("p", { class: "evaluation failed" }, problem ? `its evaluation cannot be read: ${problem}` : "evaluations cannot be read now");
  if (!evaluation) return el("p", { class: "evaluation" }, "not evaluated");
  const { gate, passed, unmet, cases, data, against, figures, updated_at: at } = evaluation;
  const verdict = passed === null ? "evaluated without a gate" : `${passed ? "passed" : "failed"} ${gate}`;
  const of = `${count(cases)} cases of ${data}${against ? `, against ${against}` : ""}`;
  const numbers = FIGURES.filter((one) => one in figures).map((one) => `${one} ${Number(figures[one].toPrecision(4))}`);
  const kind = passed === null ? "evaluation" : `evaluation ${passed ? "passed" : "failed"}`;
  return el("p", { class: kind }, [verdict, ...unmet, of, ...numbers, at && clock(Date.parse(at) / 1000)].filter(Boolean).join(" · "));
}

function historyOf({ revisions, usage_whole: whole, evaluations_known: known }) {
  const lines = revisions.map((one) => {
    const load = one.load_s === null ? "" : `load ${seconds(one.load_s)}`;
    const signed = one.signer && `signed by ${one.signer}`;
    const told = [`${clock(Date.parse(one.registered_at) / 1000)} by ${one.writer}`, requestsOf(one, whole), errorsOf(one), load, signed].filter(Boolean);
    return el("li", { class: one.role }, el("strong", {}, one.revision), ` ${one.role} `, el("span", {}, told.join(" · ")), evaluationOf(one, known));
  });
  return [el("h3", {}, "Revisions"), el("ol", { class: "revisions", role: "list" }, ...lines)];
}

function commandsFor(record, revisions) {
  const about = `${record.name} -n ${record.namespace}`;
  const told = [`lora-fs show ${about}`, `lora-fs status ${about}`, `lora-fs events ${about}`];
  if (revisions.some((one) => one.role === "canary")) told.push(`lora-fs canary ${about} --abort`);
  if (revisions.some((one) => one.role === "previous")) told.push(`lora-fs rollback ${about}`);
  const lines = el("ul", { role: "list" }, ...told.map(command));
  return el("section", { class: "commands", "data-told": told.join("\n") }, el("h3", {}, "Commands"), lines);
}

/** Copies where the browser lets a page copy; else the text is selected, for the keyboard. */
function command(text) {
  const code = el("code", {}, text);
  const button = el("button", { type: "button", "aria-label": `Copy ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(text);
      say(button, "Copied");
    } catch {
      say(button, "Selected");
    }
  });
  return el("li", {}, code, button);
}
