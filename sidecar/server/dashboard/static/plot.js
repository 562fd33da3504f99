// The last hour in three small plots over one axis of time, as far as there are samples. Drawn anew when one comes.

import { ago, byId, count, el, percent, say, seconds, svg } from "./dom.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM] = [360, 64, 4, 2];
const LEAST_S = 120; // the shortest axis
const [AT, LOADED, UNDERWAY, FAILED, IN_FLIGHT, HITS, MISSES, LOADS, FAILURES, LOAD, LOAD_MOST] = [...Array(11).keys()];

const PLOTS = [
  {
    title: "Adapters in the engine",
    lines: [
      { name: "loaded", of: (s) => s[LOADED], kind: "ready", area: true },
      { name: "under way", of: (s) => s[UNDERWAY], kind: "underway" },
      { name: "failed", of: (s) => s[FAILED], kind: "failed" },
    ],
    format: count,
  },
  {
    title: "Hit rate: this replica, last hour",
    lines: [{ name: "hit rate", of: (s) => (s[HITS] + s[MISSES] ? s[HITS] / (s[HITS] + s[MISSES]) : null), kind: "accent" }],
    most: 1,
    format: (value) => percent(value, 1),
    now: (samples) => percent(sum(samples, HITS), sum(samples, HITS) + sum(samples, MISSES)),
  },
  {
    title: "Time of a load",
    lines: [
      { name: "longest", of: (s) => s[LOAD_MOST], kind: "faint", dots: true },
      { name: "median", of: (s) => s[LOAD], kind: "underway", dots: true },
    ],
    format: seconds,
    now: (samples) => seconds(last(samples, LOAD)),
  },
];

const sum = (samples, column) => samples.reduce((all, sample) => all + sample[column], 0);
const last = (samples, column) => samples.findLast((sample) => sample[column] !== null)?.[column] ?? null;

export class Plots {
  #figures = [];
  #samples = [];
  #span = LEAST_S;
  #axis = el("span", {}, "");

  constructor() {
    for (const plot of PLOTS) {
      const value = el("span", { class: "value" });
      const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
      const scale = el("span", { class: "scale", "aria-hidden": "true" });
      const caption = el("figcaption", {}, el("span", {}, plot.title), value);
      const legend = el("p", { class: "legend", "aria-hidden": "true" });
      if (plot.lines.length > 1) {
        legend.append(...plot.lines.map((line) => el("span", { class: `k-${line.kind}` }, line.name)));
      }
      const root = el("figure", {}, caption, el("div", { class: "frame" }, picture, scale), legend);
      picture.addEventListener("mousemove", (event) => this.#read(event, plot, value));
      picture.addEventListener("mouseleave", () => this.#now(plot, value));
      byId("plots").append(root);
      this.#figures.push({ plot, picture, scale, value });
    }
    byId("plots").append(el("p", { class: "axis", "aria-hidden": "true" }, this.#axis, el("span", {}, "now")));
  }

  draw(samples) {
    this.#samples = samples;
    this.#span = samples.length ? Math.max(LEAST_S, samples.at(-1)[AT] - samples[0][AT]) : LEAST_S;
    say(this.#axis, `${ago(this.#span)} ago`);
    for (const figure of this.#figures) this.#draw(figure);
  }

  #draw({ plot, picture, scale, value }) {
    const samples = this.#samples;
    const values = plot.lines.flatMap((line) => samples.map(line.of)).filter((one) => one !== null);
    const most = plot.most ?? nice(Math.max(0, ...values));
    const end = samples.length ? samples.at(-1)[AT] : 0;
    const x = (sample) => LEFT + (1 - (end - sample[AT]) / this.#span) * (WIDTH - 2 * LEFT);
    const y = (one) => HEIGHT - BOTTOM - (most ? one / most : 0) * (HEIGHT - BOTTOM - 6);
    const shapes = [0.5, 1].map((part) => svg("path", { class: "rule", d: `M0 ${y(part * most)}H${WIDTH}` }));
    for (const line of plot.lines) {
      const points = samples.filter((s) => line.of(s) !== null).map((s) => [x(s), y(line.of(s))]);
      if (!points.length || (!line.area && most && points.every(([, py]) => py === y(0)))) continue;
      const path = points.map(([px, py], at) => `${at ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
      if (line.area) shapes.push(svg("path", { class: `area k-${line.kind}`, d: `${path}V${HEIGHT}H${points[0][0]}Z` }));
      if (line.dots) shapes.push(...points.map(([px, py]) => svg("path", { class: `dot k-${line.kind}`, d: `M${px.toFixed(1)} ${py.toFixed(1)}h0` })));
      else shapes.push(svg("path", { class: `line k-${line.kind}`, d: path }));
    }
    picture.replaceChildren(...shapes);
    say(scale, most && values.length ? plot.format(most) : "");
    this.#now(plot, value);
    picture.setAttribute("aria-label", `${plot.title}, last hour: ${value.textContent || "nothing yet"}`);
  }

  #now(plot, value) {
    const samples = this.#samples;
    if (!samples.length) return say(value, "");
    if (plot.now) return say(value, plot.now(samples));
    say(value, plot.lines.filter((line, at) => at === 0 || line.of(samples.at(-1))).map((line) => `${plot.format(line.of(samples.at(-1)))} ${line.name}`).join(" · "));
  }

  #read(event, plot, value) {
    const samples = this.#samples;
    if (!samples.length) return;
    const box = event.currentTarget.getBoundingClientRect();
    const at = samples.at(-1)[AT] - (1 - (event.clientX - box.left) / box.width) * this.#span;
    const near = samples.reduce((best, sample) => (Math.abs(sample[AT] - at) < Math.abs(best[AT] - at) ? sample : best));
    const time = new Date(1000 * near[AT]).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    const told = plot.lines.map((line) => (line.of(near) === null ? null : `${plot.format(line.of(near))} ${line.name}`));
    say(value, [time, ...told.filter(Boolean)].join(" · "));
  }
}

function nice(value) {
  if (value <= 0) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value);
}
