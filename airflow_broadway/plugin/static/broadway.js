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

  // A page that follows something: the element says where its new content comes from.
  const PAUSE = 3000;
  const PAUSE_AFTER_ERROR = 15000;

  const isInUse = (part) => {
    const selection = document.getSelection();
    return Boolean(selection && !selection.isCollapsed && part.contains(selection.anchorNode));
  };

  // Where the focus is: by the article that it is in, as articles may change their order.
  const FOCUSABLE = "a, button, summary, [tabindex]";
  const focusIn = (part) => {
    const active = document.activeElement;
    if (!part.contains(active)) return null;
    const article = active.closest("article[id]");
    const links = (article || part).querySelectorAll(FOCUSABLE);
    return { article: article ? article.id : null, place: [...links].indexOf(active) };
  };
  const focusAgain = (part, { article, place }) => {
    const owner = article === null ? part : document.getElementById(article);
    const there = owner && owner.querySelectorAll(FOCUSABLE)[place];
    if (there) there.focus({ preventScroll: true });
  };

  // What a person has opened, scrolled to and focused stays as it is.
  const replaceContent = (part, text) => {
    const before = {
      open: new Map([...part.querySelectorAll("details")].map((each, n) => [each.id || n, each.open])),
      left: [...part.querySelectorAll(".frame")].map((each) => each.scrollLeft),
      focus: focusIn(part),
    };
    part.innerHTML = text;
    part.querySelectorAll("details").forEach((each, n) => { each.open = before.open.get(each.id || n) ?? each.open; });
    part.querySelectorAll(".frame").forEach((each, n) => { each.scrollLeft = before.left[n] ?? 0; });
    if (before.focus) focusAgain(part, before.focus);
    tellLocalTimes(part);
  };

  const follow = async (part) => {
    let pause = Number(part.dataset.pause) || PAUSE;
    if (!document.hidden && !isInUse(part)) {
      try {
        const answer = await fetch(part.dataset.live, { cache: "no-store" });
        if (!answer.ok) throw new Error(String(answer.status));
        replaceContent(part, await answer.text());
        part.removeAttribute("data-stale");
        part.removeAttribute("aria-busy");
        if (part.querySelector("[data-over]")) return;
      } catch {
        part.setAttribute("data-stale", "");
        pause = Math.max(pause, PAUSE_AFTER_ERROR);
      }
    }
    window.setTimeout(() => follow(part), pause);
  };

  // A box that marks all others of a name.
  const serveMarkers = (part) => {
    for (const marker of part.querySelectorAll("input[data-marks]")) {
      marker.hidden = false;
      marker.addEventListener("change", () => {
        for (const box of marker.form.querySelectorAll('input[type="checkbox"]')) {
          if (box.name === marker.dataset.marks) box.checked = marker.checked;
        }
      });
    }
  };

  // Airflow's frame lets no page of ours lead it elsewhere, but Airflow's own page may.
  const leaveFrame = (event) => {
    const link = event.target.closest("a[target='_top']");
    if (!link || window.self === window.top || event.button || event.metaKey || event.ctrlKey) return;
    try {
      const outside = window.parent.document.createElement("a");
      outside.href = link.href;
      window.parent.document.body.append(outside);
      outside.click();
      outside.remove();
      event.preventDefault();
    } catch {
      // Another site's frame: the browser does what it does with such a link.
    }
  };

  document.addEventListener("click", leaveFrame);
  document.addEventListener("DOMContentLoaded", () => {
    tellLocalTimes(document);
    serveMarkers(document);
    for (const part of document.querySelectorAll("[data-live]")) {
      window.setTimeout(() => follow(part), "now" in part.dataset ? 0 : PAUSE);
    }
  });
})();
