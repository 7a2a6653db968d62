// What server-made pages cannot do themselves.  Every page works without it.
"use strict";

(() => {
  // Airflow's choice of light or dark, where its UI frames the page.
  const root = document.documentElement;
  const takeTheme = () => {
    let theme = null;
    try {
      theme = window.localStorage.getItem("theme");
    } catch {
      // No storage: the system's choice stands.
    }
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    else delete root.dataset.theme;
  };
  takeTheme();
  window.addEventListener("storage", takeTheme);
  root.dataset.framed = window.self === window.top ? "no" : "yes";

  // Local time on hover.
  const tellLocalTimes = (part) => {
    for (const time of part.querySelectorAll("time[datetime]:not([title])")) {
      time.title = new Date(time.dateTime).toLocaleString(undefined, {
        dateStyle: "full",
        timeStyle: "long",
      });
    }
  };

  document.addEventListener("DOMContentLoaded", () => tellLocalTimes(document));
})();
