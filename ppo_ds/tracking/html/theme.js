// Switches between light and dark. Runs before the page is drawn, so that a stored choice does not flash.
"use strict";

(() => {
  const KEY = "ppo_ds-theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const changed = () => document.dispatchEvent(new CustomEvent("themechange"));
  try {
    const choice = localStorage.getItem(KEY);
    if (choice === "light" || choice === "dark") root.dataset.theme = choice;
  } catch {
    // Storage is refused in some private windows; the choice then lasts until the page is closed.
  }
  document.addEventListener("click", (event) => {
    if (!event.target.closest?.("[data-theme-switch]")) return;
    const dark = (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
    root.dataset.theme = dark ? "light" : "dark";
    changed();
    try {
      localStorage.setItem(KEY, root.dataset.theme);
    } catch {
      // see above
    }
  });
  system.addEventListener("change", changed);
})();
