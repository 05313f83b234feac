// Keeps the page fresh and sends decisions. Everything but deciding works without this file.
"use strict";

const REFRESH_SECONDS = Math.min(10, Number(document.currentScript.dataset.refresh));
const PATIENCE_MILLISECONDS = 5_000; // with the time between two looks at most 15 seconds
const FOREIGN = 0; // in place of a status: the page is none of the sidecar's
const decide = document.getElementById("decide");
const STATE = { bad: "#b3261e", warn: "#b07400", good: "#1a6b3c", away: "#6b7280" };
let answeredAt = new Date(), looking = null;

// --- times: as UTC, or as the clock of this computer says, chosen once for all pages ---

function isLocal() {
  return localStorage.getItem("driftguard.clock") === "local";
}

function stamp(at, local) { // YYYY-MM-DD HH:MM:SS
  return new Date(at.getTime() - (local ? at.getTimezoneOffset() * 60_000 : 0)).toISOString().slice(0, 19).replace("T", " ");
}

function clock(at, local = isLocal()) {
  if (!local) return `${stamp(at, false)} UTC`;
  const minutes = -at.getTimezoneOffset(), two = (n) => String(Math.floor(n)).padStart(2, "0");
  return `${stamp(at, true)} UTC${minutes < 0 ? "-" : "+"}${two(Math.abs(minutes) / 60)}:${two(Math.abs(minutes) % 60)}`;
}

function setTimes(place) {
  for (const element of place.querySelectorAll("time[datetime]")) {
    const at = new Date(element.dateTime);
    element.textContent = clock(at);
    element.title = clock(at, !isLocal());
  }
}

function offerClock() {
  const button = document.getElementById("clock");
  const show = () => { button.textContent = isLocal() ? "Times: local" : "Times: UTC"; };
  button.hidden = false;
  show();
  button.addEventListener("click", () => {
    localStorage.setItem("driftguard.clock", isLocal() ? "utc" : "local");
    show();
    setTimes(document);
    document.dispatchEvent(new Event("clock"));
  });
}

// --- the page as it is now ---

function look() { // one at a time; what was read last stays, and says so, where nothing new can be read
  looking ??= refresh().then((status) => status, () => null).then((status) => {
    looking = null;
    const note = document.getElementById("stale"), fresh = status === 200;
    if (fresh) answeredAt = new Date();
    note.hidden = fresh;
    if (!fresh) {
      const time = Object.assign(document.createElement("time"), { dateTime: answeredAt.toISOString(), textContent: clock(answeredAt) });
      note.replaceChildren(`${happened(status)} came at `, time, ": what you see is of then.");
    }
    setIcon(fresh);
  });
  return looking;
}

function happened(status) {
  if (status === null) return "The sidecar does not answer. Its last answer";
  return status === FOREIGN ? "Another page answers, such as a login. The last one of the sidecar" : `The sidecar answered with an error, ${status}. Its last page`;
}

async function refresh() { // returns the status of the answer
  const answer = await fetch(location.pathname + location.search, { signal: AbortSignal.timeout(PATIENCE_MILLISECONDS) });
  const text = await answer.text();
  if (answer.status !== 200) return answer.status;
  const fresh = new DOMParser().parseFromString(text, "text/html");
  if (!fresh.body.dataset.state) return FOREIGN;
  document.title = fresh.title;
  document.body.dataset.state = fresh.body.dataset.state;
  for (const part of document.querySelectorAll("[data-live]")) {
    const other = same(fresh, part);
    if (!other) {
      leave(part);
      continue;
    }
    show(other);
    setTimes(other);
    if (other.innerHTML !== part.innerHTML) replace(part, other);
  }
  enter(fresh);
  offer();
  document.dispatchEvent(new Event("refreshed"));
  return answer.status;
}

function same(place, part) {
  return place.querySelector(`[data-live="${part.dataset.live}"]`);
}

function leave(part) { // a card that is no more; of the one to decide, what came of it stays
  if (part.parentElement.id === "main") part.remove();
  else if (decide?.contains(part)) part.replaceChildren();
}

function enter(fresh) { // cards that were not there, where they are in the fresh page
  let next = null;
  for (const other of [...fresh.querySelectorAll("#main > [data-live]")].reverse()) {
    const part = same(document, other);
    if (!part) {
      show(other);
      setTimes(other);
      document.getElementById("main").insertBefore(other, next);
    }
    next = part ?? other;
  }
}

function setIcon(answered) { // the tab says how it stands
  const state = answered ? document.body.dataset.state : "away";
  const drawn = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><circle cx="8" cy="8" r="7" fill="${STATE[state]}"/></svg>`;
  document.querySelector("link[rel=icon]").href = `data:image/svg+xml,${encodeURIComponent(drawn)}`;
}

function replace(part, other) { // keeps the focus on the same link or button
  const focused = part.contains(document.activeElement) ? document.activeElement.outerHTML : null;
  part.innerHTML = other.innerHTML;
  part.className = other.className;
  if (focused) [...part.querySelectorAll("a, button")].find((item) => item.outerHTML === focused)?.focus();
}

const folded = new Map(); // of details with data-fold, what the reader chose
const narrow = matchMedia("(max-width: 760px)");

function show(place) { // what works only with this file; on a phone the long parts begin folded
  for (const button of place.querySelectorAll("[data-post]")) button.hidden = false;
  for (const part of place.querySelectorAll("details[data-fold]")) part.open = folded.get(part.dataset.fold) ?? (part.open && !narrow.matches);
}

document.addEventListener("click", (event) => {
  const part = event.target.closest("details[data-fold] > summary")?.parentElement;
  if (part) folded.set(part.dataset.fold, !part.open);
});

function offer() { // hides the fields when no decision is left
  const fields = decide?.querySelector("[data-fields]");
  if (fields) fields.hidden = !decide.querySelector("[data-post]");
}

function say(text, failed) {
  const place = decide.querySelector("[role=status]");
  place.textContent = text;
  place.className = failed ? "failed" : "";
}

decide?.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-post]");
  if (button) act(button).catch((error) => say(`No answer of the sidecar: ${error.message}. It may be done all the same: look before you repeat it.`, true));
});

async function act(button) { // the key stays in its field: nothing stores it
  const key = document.getElementById("key")?.value;
  const reason = document.getElementById("reason").value;
  const body = JSON.parse(button.dataset.body);
  button.disabled = true;
  try {
    const answer = await fetch(button.dataset.post, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) },
      body: JSON.stringify("force" in body ? body : { ...body, reason }),
    });
    const told = await answer.json().catch(() => { throw new Error(`HTTP ${answer.status}, as of a proxy in front of it`); });
    say(answer.ok ? outcome(told) : `${told.title}: ${told.detail}`, !answer.ok);
    if (answer.ok) await look();
  } finally {
    button.disabled = false;
  }
}

function outcome(told) {
  if (told.job_id) return "A retraining is queued; its run appears under Retraining.";
  if (told.stream_id) return "Its records are read again within seconds.";
  if (told.awaited) return `The server was told to serve draft ${told.draft_version}; its records are awaited.`;
  return told.draft_version ? `Draft ${told.draft_version} is in service.` : `The incident is ${told.state}.`;
}

show(document);
offer();
offerClock();
setTimes(document);
setIcon(true);
setInterval(() => { if (!document.hidden) look(); }, 1000 * REFRESH_SECONDS);
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
