// Draws the acceptance of one stream over time: segments, baseline, change points, promotions.
"use strict";

const COLOURS = ["#3b82f6", "#e0792b", "#10a37f", "#b455d6", "#d6455f", "#8a8f2a", "#0ea5c6", "#a0703c"];
const NARROW = 600;
const chart = document.getElementById("chart");
const chosen = document.getElementById("segment");
let minutes = "60", series = null, width = 0; // how far back, what is drawn, and how wide

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function escapeText(text) { // Plotly reads a few HTML tags in its texts
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function traces() {
  const order = [...new Set(series.lines.filter((l) => l.segment !== null).map((l) => l.segment))].sort();
  const named = new Set();
  const shown = series.lines.filter((line) => !chosen.value || line.segment === chosen.value);
  return shown.map((line) => {
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

function baseline() { // {trace, shapes}: its level with its number in the legend, its interval as a band
  const level = JSON.parse(document.getElementById("baselines").textContent)[chosen.value];
  if (!level) return { trace: [], shapes: [] };
  const hue = colour("--good"), [rate, low, high] = [level.rate, level.low, level.high].map((value) => value.toFixed(3));
  return {
    trace: [{ x: [series.since, series.until], y: [level.rate, level.rate], mode: "lines", line: { color: hue, width: 1 },
      name: `baseline ${rate} (${low}–${high})`, hoverinfo: "skip" }],
    shapes: [{ type: "rect", xref: "paper", x0: 0, x1: 1, y0: level.low, y1: level.high, layer: "below",
      fillcolor: hue, opacity: 0.25, line: { width: 0 } }],
  };
}

function marks() {
  const shapes = [], annotations = [];
  const middle = (Date.parse(series.since) + Date.parse(series.until)) / 2;
  const mark = (at, text, hue, level) => {
    const left = Date.parse(at) > middle; // so that the text is not cut off at the edge
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
  const answer = await fetch(`/api/v1/streams/${chart.dataset.stream}/acceptance?minutes=${minutes}`);
  if (!answer.ok) return;
  series = await answer.json();
  paint();
}

function paint() {
  width = chart.clientWidth;
  const { shapes, annotations } = marks(), level = baseline();
  const narrow = width < NARROW;
  const axis = { gridcolor: colour("--line"), zeroline: false, linecolor: colour("--line") };
  const layout = {
    width, height: narrow ? 300 : 340, margin: { l: narrow ? 32 : 48, r: 8, t: 12, b: 36 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), family: "system-ui, sans-serif" }, hovermode: "closest",
    hoverlabel: { bgcolor: colour("--card"), font: { color: colour("--ink") } },
    legend: { orientation: "h", y: narrow ? -0.25 : -0.15 },
    xaxis: { ...axis, type: "date", range: [series.since, series.until] },
    yaxis: { ...axis, range: [0, 1], tickformat: ".1f", ...(narrow ? {} : { title: { text: "acceptance rate" } }) },
    uirevision: chosen.value + "/" + minutes,
    shapes: [...level.shapes, ...shapes], annotations,
  };
  Plotly.react(chart, [...traces(), ...level.trace], layout, { displayModeBar: false, staticPlot: narrow });
}

function press() {
  for (const button of document.querySelectorAll("[data-choices] button")) {
    button.setAttribute("aria-pressed", String(button.dataset.minutes === minutes));
  }
}

if (chart && typeof Plotly !== "undefined") {
  const choices = document.querySelector("[data-choices]");
  choices.hidden = false;
  choices.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    minutes = button.dataset.minutes;
    press();
    draw();
  });
  chosen.addEventListener("change", paint);
  // its place narrows when a scroll bar appears
  new ResizeObserver(() => { if (series && chart.clientWidth !== width) paint(); }).observe(chart);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  document.addEventListener("refreshed", draw);
  press();
  draw();
}
