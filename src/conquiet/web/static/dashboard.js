// Searches: say how much was found to those who do not see the table change.
"use strict";

document.addEventListener("htmx:afterSettle", () => {
  const found = document.querySelector("#found caption, #found .empty");
  document.getElementById("status").textContent = found ? found.textContent : "";
});

// Live parts: the server sends the HTML of a part at every refresh.
(() => {
  const part = document.querySelector("[data-live]");
  const button = document.getElementById("live");
  if (!part || !button || !window.EventSource) return;

  let source = null;
  let paused = false;

  const say = (word) => {
    button.textContent = word;
    button.dataset.state = word.toLowerCase();
  };

  const listen = () => {
    if (source || paused || document.hidden) return;
    say("Connecting");
    source = new EventSource(part.dataset.live);
    source.onmessage = (event) => {
      say("Live");
      // htmx keeps the focus where it is; a table that was scrolled stays so.
      const scrolled = [...part.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
      window.htmx.swap(part, event.data, { swapStyle: "innerHTML" });
      document.dispatchEvent(new Event("conquiet:live"));
      part.querySelectorAll(".scroll").forEach((box, at) => { box.scrollLeft = scrolled[at] || 0; });
    };
    source.onerror = () => {
      say("Offline");
      if (source && source.readyState === EventSource.CLOSED) {
        silence();
        window.setTimeout(listen, 5000);
      }
    };
  };

  const silence = () => {
    if (source) source.close();
    source = null;
  };

  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(!paused));
    if (paused) { silence(); say("Paused"); } else { listen(); }
  });
  // A browser has few connections to a server: hidden tabs close theirs.
  document.addEventListener("visibilitychange", () => (document.hidden ? silence() : listen()));
  window.addEventListener("pagehide", silence);
  listen();
})();

// Charts: the label of the step under the pointer, or of the one that the arrow keys reach.
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  let at = null;
  let where = [-1, -1];

  const show = (step) => {
    if (at) at.classList.remove("at");
    at = step;
    if (!step) { tip.remove(); return; }
    const title = step.querySelector("title");
    if (title) { step.dataset.label = title.textContent; title.remove(); } // else the browser shows it, too
    step.classList.add("at");
    const chart = step.closest(".chart");
    where = [[...document.querySelectorAll(".chart")].indexOf(chart), [...chart.querySelectorAll(".step")].indexOf(step)];
    chart.append(tip);
    tip.textContent = step.dataset.label;
    const box = chart.getBoundingClientRect();
    const middle = step.getBoundingClientRect().left + step.getBoundingClientRect().width / 2 - box.left;
    tip.style.left = `${Math.max(4, Math.min(middle - tip.offsetWidth / 2, box.width - tip.offsetWidth - 4))}px`;
  };

  // A live part is replaced while the pointer rests on a chart.
  document.addEventListener("conquiet:live", () => {
    if (!at || at.isConnected) return;
    const [chart, place] = where;
    const steps = document.querySelectorAll(".chart")[chart]?.querySelectorAll(".step");
    show(steps?.[place] ?? null);
  });

  document.addEventListener("pointermove", (event) => {
    const step = event.target instanceof Element ? event.target.closest(".step") : null;
    if (step !== at) show(step);
  });
  document.addEventListener("pointerdown", (event) => {
    show(event.target instanceof Element ? event.target.closest(".step") : null);
  });
})();

// Times: the distance from now grows while a page is open; the exact time is in the title.
(() => {
  const span = (seconds) => {
    const whole = Math.floor(seconds);
    if (whole < 60) return `${whole} s`;
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
    if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
    return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
  };
  window.setInterval(() => {
    for (const one of document.querySelectorAll("time.ago")) {
      const seconds = (Date.now() - Date.parse(one.dateTime)) / 1000;
      if (Number.isNaN(seconds)) continue;
      one.textContent = Math.abs(seconds) < 1 ? "now" : seconds > 0 ? `${span(seconds)} ago` : `in ${span(-seconds)}`;
    }
  }, 10000);
})();

// Lists: one box selects all others of its page.
document.addEventListener("change", (event) => {
  if (!event.target.matches?.(".pick-all")) return;
  for (const one of event.target.form.elements.pick.length === undefined ? [event.target.form.elements.pick] : event.target.form.elements.pick) {
    one.checked = event.target.checked;
  }
});
for (const when of ["DOMContentLoaded", "htmx:afterSettle"]) {
  document.addEventListener(when, () => document.querySelectorAll(".pick-all").forEach((one) => { one.hidden = false; }));
}
