// Draws the acceptance chart and keeps the page fresh. Everything else is readable without this file.
"use strict";

const REFRESH_MILLISECONDS = 10000;
const COLOURS = ["#3b82f6", "#e0792b", "#10a37f", "#b455d6", "#d6455f", "#8a8f2a", "#0ea5c6", "#a0703c"];
const chart = document.getElementById("chart");
const decide = document.getElementById("decide");
const first = document.querySelector("[data-choices] [data-stream]");
const choice = { stream: chart?.dataset.stream ?? first?.dataset.stream, minutes: "60" };
let series = null, width = 0; // what the chart shows, and how wide it was drawn

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function traces(series) {
  const order = [...new Set(series.lines.filter((l) => l.segment !== null).map((l) => l.segment))].sort();
  const named = new Set();
  return series.lines.map((line) => {
    const name = line.segment ?? "all segments";
    const showlegend = !named.has(name);
    named.add(name);
    return {
      x: line.points.map((p) => p.at),
      y: line.points.map((p) => p.acceptance),
      customdata: line.points.map((p) => [p.requests, line.draft_version]),
      name: escapeText(name), showlegend, legendgroup: name, mode: "lines+markers", marker: { size: 4 },
      line: line.segment === null
        ? { color: colour("--quiet"), width: 3, dash: "dot" }
        : { color: COLOURS[order.indexOf(line.segment) % COLOURS.length], width: 2 },
      hovertemplate: "%{y:.3f} · %{customdata[0]} requests · draft %{customdata[1]}<extra>" + escapeText(name) + "</extra>",
    };
  });
}

function escapeText(text) { // Plotly reads a few HTML tags in its texts
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function marks(series) {
  const shapes = [], annotations = [];
  const middle = (Date.parse(series.since) + Date.parse(series.until)) / 2;
  const mark = (at, text, hue, level) => {
    const left = Date.parse(at) > middle; // so that the edge cuts no text off
    shapes.push({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: { color: hue, width: 2, dash: "dash" } });
    annotations.push({ x: at, yref: "paper", y: level, text: escapeText(text), showarrow: false,
      xanchor: left ? "right" : "left", xshift: left ? -4 : 4, font: { color: hue, size: 12 }, bgcolor: colour("--card") });
  };
  for (const point of series.change_points) {
    const hue = colour(point.direction === "down" ? "--bad" : "--info");
    shapes.push({ type: "rect", x0: point.interval[0], x1: point.interval[1], yref: "paper", y0: 0, y1: 1,
      fillcolor: hue, opacity: 0.12, line: { width: 0 } });
    mark(point.at, point.direction === "down" ? "acceptance fell" : "acceptance rose", hue, 1);
  }
  for (const promotion of series.promotions) {
    mark(promotion.at, "draft " + promotion.draft_version + " promoted", colour("--good"), 0.06);
  }
  return { shapes, annotations };
}

async function draw() {
  if (!chart || !choice.stream || typeof Plotly === "undefined") return;
  const answer = await fetch(`/api/v1/streams/${choice.stream}/acceptance?minutes=${choice.minutes}`);
  if (!answer.ok) return;
  series = await answer.json();
  paint();
}

function paint() {
  const axis = { gridcolor: colour("--line"), zeroline: false, linecolor: colour("--line") };
  const layout = {
    width: chart.clientWidth, height: 340, margin: { l: 48, r: 12, t: 12, b: 36 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), family: "system-ui, sans-serif" }, hovermode: "closest",
    hoverlabel: { bgcolor: colour("--card"), font: { color: colour("--ink") } },
    legend: { orientation: "h", y: -0.15 },
    xaxis: { ...axis, type: "date", range: [series.since, series.until] },
    yaxis: { ...axis, range: [0, 1], tickformat: ".1f", title: { text: "acceptance rate" } },
    uirevision: choice.stream + "/" + choice.minutes,
    ...marks(series),
  };
  width = chart.clientWidth;
  Plotly.react(chart, traces(series), layout, { displayModeBar: false });
}

if (chart) { // its place narrows when a scroll bar appears
  new ResizeObserver(() => { if (series && chart.clientWidth !== width) paint(); }).observe(chart);
}

function press() {
  for (const button of document.querySelectorAll("[data-choices] button")) {
    const pressed = button.dataset.stream === choice.stream || button.dataset.minutes === choice.minutes;
    button.setAttribute("aria-pressed", String(pressed));
  }
}

async function refresh() {
  const answer = await fetch(location.pathname);
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.title = fresh.title;
  for (const part of document.querySelectorAll("[data-live]")) {
    const other = fresh.querySelector(`[data-live="${part.dataset.live}"]`);
    if (other && other.innerHTML !== part.innerHTML) {
      part.innerHTML = other.innerHTML;
      part.className = other.className;
    }
  }
  offer();
  await draw();
}

function offer() { // nothing is left to decide about a resolved incident
  if (decide) decide.hidden = !decide.querySelector("button");
}

for (const bar of document.querySelectorAll("[data-choices]")) {
  bar.hidden = false;
  bar.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    Object.assign(choice, button.dataset.stream ? { stream: button.dataset.stream } : { minutes: button.dataset.minutes });
    press();
    draw();
  });
}
decide?.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) act(button).catch((error) => say(String(error)));
});

function say(text) {
  decide.querySelector("[role=status]").textContent = text;
}

async function act(button) { // the key stays in its field: nothing stores it
  const key = document.getElementById("key")?.value;
  button.disabled = true;
  try {
    const answer = await fetch(`/api/v1/incidents/${decide.dataset.incident}/${button.dataset.action}`, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) },
      body: JSON.stringify({ reason: document.getElementById("reason").value }),
    });
    const told = await answer.json();
    say(answer.ok ? "The incident is " + told.state + "." : told.detail);
    if (answer.ok) await refresh();
  } finally {
    button.disabled = false;
  }
}

press();
offer();
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
setInterval(() => { if (!document.hidden) refresh().catch(() => {}); }, REFRESH_MILLISECONDS);
