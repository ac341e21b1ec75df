// Switches between light and dark. Runs before the page is drawn, so that a stored choice does not flash.
"use strict";

(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const changed = () => document.dispatchEvent(new CustomEvent("themechange"));
  const stored = (action) => {
    try {
      return action(localStorage);
    } catch {
      return null; // storage is refused in some private windows; the choice then lasts until the page is closed
    }
  };
  const choice = stored((storage) => storage.getItem("ppo_ds-theme"));
  if (choice === "light" || choice === "dark") root.dataset.theme = choice;
  document.addEventListener("click", (event) => {
    if (!event.target.closest?.("[data-theme-switch]")) return;
    const dark = (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
    root.dataset.theme = dark ? "light" : "dark";
    stored((storage) => storage.setItem("ppo_ds-theme", root.dataset.theme));
    changed();
  });
  system.addEventListener("change", changed);
})();
