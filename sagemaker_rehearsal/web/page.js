"use strict";
// Shows what the endpoint sends about the page (web/stream.py). Without it, the page shows what was when it was loaded.
const SHOWN_CHARACTERS = 262144;
const data = document.body.dataset;
const lines = document.getElementById("lines");
const follow = document.getElementById("follow");
let start = data.start;
let source = null;

function replace(section, html) {
  if (section.innerHTML === html) return;
  section.onmouseleave = null;
  // What the pointer is on shows its value, and would be gone.
  if (section.querySelector("svg:hover")) {
    section.onmouseleave = () => replace(section, html);
    return;
  }
  const opened = [...section.querySelectorAll("details")].map((each) => each.open);
  const places = [...section.querySelectorAll(".table")].map((each) => [each.scrollLeft, each.scrollTop]);
  const selector = "a, button, input, summary, .table";
  const focused = [...section.querySelectorAll(selector)].indexOf(document.activeElement);
  section.innerHTML = html;
  section.querySelectorAll("details").forEach((each, place) => (each.open = opened[place] || false));
  section.querySelectorAll(".table").forEach((each, place) => each.scrollTo(...(places[place] || [0, 0])));
  if (focused >= 0) section.querySelectorAll(selector)[focused]?.focus({ preventScroll: true });
}

function show(event) {
  for (const [id, html] of Object.entries(JSON.parse(event.data))) {
    const section = document.getElementById(id);
    if (section) replace(section, html);
  }
}

function add(event) {
  start = event.lastEventId;
  lines.append(JSON.parse(event.data));
  let count = lines.textContent.length;
  while (count > SHOWN_CHARACTERS && lines.childNodes.length > 1) {
    count -= lines.firstChild.length;
    lines.firstChild.remove();
  }
  if (follow.checked) lines.scrollTop = lines.scrollHeight;
}

function close() {
  source?.close();
  source = null;
}

// A browser has six connections to an address: a page that nobody sees takes none.
function open() {
  if (source || document.hidden || !data.stream) return;
  source = new EventSource(data.stream + (start ? `&start=${start}` : ""));
  source.addEventListener("parts", show);
  source.addEventListener("lines", add);
  source.addEventListener("end", () => {
    delete data.stream;
    close();
  });
  const lost = document.getElementById("lost");
  source.onopen = () => (lost.textContent = "");
  source.onerror = () => (lost.textContent = "The rehearsal does not answer: what is shown may be old.");
}

document.body.classList.add("scripts");
document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
window.addEventListener("pagehide", close);
window.addEventListener("pageshow", open);
document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});
if (lines) lines.scrollTop = lines.scrollHeight;
open();
