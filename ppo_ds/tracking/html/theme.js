// Switches between light and dark. Runs before the page is drawn, so that a stored choice does not flash.
"use strict";

(() => {
  const KEY = "ppo_ds-theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");

  // Storage is refused in some private windows; the switch then lasts until the page is closed.
  const stored = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  };
  const store = (theme) => {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      /* see above */
    }
  };

  const current = () => root.dataset.theme ?? (system.matches ? "dark" : "light");
  const choice = stored();
  if (choice === "light" || choice === "dark") root.dataset.theme = choice;

  document.addEventListener("click", (event) => {
    if (!event.target.closest?.("[data-theme-switch]")) return;
    root.dataset.theme = current() === "dark" ? "light" : "dark";
    store(root.dataset.theme);
    document.dispatchEvent(new CustomEvent("themechange"));
  });
})();
