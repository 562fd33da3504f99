// Dark or light: the system's, until the button asks for the other one. This browser remembers it.

import { byId } from "./dom.js";

const KEPT_AS = "lora-fs-theme";

export function followTheme() {
  byId("theme").addEventListener("click", () => {
    const isDark = getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
    localStorage.setItem(KEPT_AS, isDark ? "light" : "dark");
    take();
  });
  take();
}

function take() {
  document.documentElement.dataset.theme = localStorage.getItem(KEPT_AS) ?? "";
}
