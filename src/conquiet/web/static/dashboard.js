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
