// Keeps the page fresh and sends decisions. Everything but deciding works without this file.
"use strict";

const REFRESH_SECONDS = Math.min(10, Number(document.currentScript.dataset.refresh));
const decide = document.getElementById("decide");

async function look() { // what was read last stays, and says so, where nothing new can be read
  const note = document.getElementById("stale");
  try {
    await refresh();
    note.hidden = true;
  } catch {
    const time = document.querySelector("footer").textContent.trim();
    note.textContent = `The sidecar does not answer since ${time}: what you see is of then.`;
    note.hidden = false;
  }
}

async function refresh() {
  const answer = await fetch(location.pathname + location.search);
  if (!answer.ok) throw new Error(`answered with ${answer.status}`);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.title = fresh.title;
  for (const part of document.querySelectorAll("[data-live]")) {
    const other = fresh.querySelector(`[data-live="${part.dataset.live}"]`);
    if (!other) continue;
    show(other);
    if (other.innerHTML !== part.innerHTML) replace(part, other);
  }
  offer();
  document.dispatchEvent(new Event("refreshed"));
}

function replace(part, other) { // keeps the focus on the same link or button
  const focused = part.contains(document.activeElement) ? document.activeElement.outerHTML : null;
  part.innerHTML = other.innerHTML;
  part.className = other.className;
  if (focused) [...part.querySelectorAll("a, button")].find((item) => item.outerHTML === focused)?.focus();
}

function show(place) { // what works only with this file
  for (const button of place.querySelectorAll("[data-post]")) button.hidden = false;
}

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
  if (button) act(button).catch((error) => say(`Not sent: ${error.message}.`, true));
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
    const told = await answer.json();
    say(answer.ok ? outcome(told) : `${told.title}: ${told.detail}`, !answer.ok);
    if (answer.ok) await look();
  } finally {
    button.disabled = false;
  }
}

function outcome(told) {
  if (told.job_id) return "A retraining is queued; its run appears under Retraining.";
  if (told.stream_id) return "Its records are read again within seconds.";
  return told.draft_version ? `Draft ${told.draft_version} is in service.` : `The incident is ${told.state}.`;
}

show(document);
offer();
setInterval(() => { if (!document.hidden) look(); }, 1000 * REFRESH_SECONDS);
