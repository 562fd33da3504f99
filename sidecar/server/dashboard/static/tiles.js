// The numbers at the top of a page.

import { byId, el, say } from "./dom.js";

/** Show `[title, value, class]` of each. */
export function drawTiles(told) {
  const tiles = byId("tiles");
  told.forEach(([title, value, kind], at) => {
    if (!tiles.children[at]) tiles.append(el("div", {}, el("dt", {}, title), el("dd")));
    const tile = tiles.children[at];
    tile.className = kind;
    say(tile.querySelector("dd"), value);
  });
}
