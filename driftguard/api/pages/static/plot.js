// What the charts of all pages share: colours, axes, legends, the cursor and its keys, the numbers as a table.
"use strict";

const COLOURS = ["#3b82f6", "#e0792b", "#10a37f", "#b455d6", "#d6455f", "#8a8f2a", "#0ea5c6", "#a0703c"];
const NARROW = 600, AXIS = 48;
const place = document.getElementById("charts");
const table = document.getElementById("numbers");
let plots = []; // below each other, with one x

function canDraw() {
  if (place && typeof uPlot === "undefined") document.getElementById("no-uplot").hidden = false;
  return place && typeof uPlot !== "undefined";
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function timeElement(at) {
  const element = document.createElement("time");
  element.dateTime = at;
  element.textContent = clock(new Date(at));
  return element;
}

// --- axes ---

function axisStyle() {
  const grid = { stroke: colour("--line"), width: 1 };
  return { stroke: colour("--quiet"), grid, ticks: { ...grid, size: 4 }, font: "12px system-ui, sans-serif" };
}

function short(_, splits) { // at an axis
  return splits.map((value) => (value === null ? "" : Math.abs(value) >= 1000 ? `${+(value / 1000).toFixed(1)}k` : `${+value.toFixed(3)}`));
}

function fitted(least, most, span) { // a range with room, at least as wide as span
  return (plot, low, high) => {
    const band = plot.band;
    if (band) [low, high] = [Math.min(low ?? 1, band.low), Math.max(high ?? 0, band.high)];
    if (low == null || low > high) return [0, 1];
    const room = Math.max(0.08 * (high - low), (span - (high - low)) / 2);
    return [Math.max(least, low - room), Math.min(most, high + room)];
  };
}

function from0(_, low, high) {
  return [0, 1.1 * (high || 1)];
}

// --- drawing ---

function drawIn(parent, chart, options, more) { // chart: {name, unit, digits, missing, curves: [{name, hue}]}
  const figure = document.createElement("figure"), caption = document.createElement("figcaption"), missing = document.createElement("p");
  const name = document.createElement("b"), list = document.createElement("ul");
  name.textContent = chart.name;
  list.className = "legend";
  caption.append(name, chart.unit ? ` ${chart.unit} ` : " ", list);
  missing.className = "missing hint";
  missing.textContent = chart.missing ?? "";
  figure.append(caption, missing);
  parent.append(figure);
  return new uPlot(options, [[], ...chart.curves.map(() => [])], (made, start) => {
    Object.assign(made, { ...more, chart, figure });
    figure.insertBefore(made.root, missing);
    start();
  });
}

function legend(plot) { // each name once, with its colour and the value at the cursor
  const seen = new Map();
  plot.chart.curves.forEach((curve, i) => {
    if (!seen.has(curve.name)) seen.set(curve.name, { ...curve, places: [] });
    seen.get(curve.name).places.push(i + 1);
  });
  const items = [...seen.values()].map((curve) => legendItem(curve.name, curve.hue, curve.places.join()));
  if (plot.band) {
    const [rate, low, high] = [plot.band.rate, plot.band.low, plot.band.high].map((value) => value.toFixed(3));
    items.push(legendItem(`baseline ${rate} (${low}–${high})`, colour("--good"), ""));
  }
  plot.figure.querySelector(".legend").replaceChildren(...items);
}

function legendItem(name, hue, places) {
  const item = document.createElement("li"), swatch = document.createElement("i"), value = document.createElement("b");
  const label = Object.assign(document.createElement("bdi"), { textContent: name });
  swatch.style.background = hue;
  value.dataset.places = places;
  item.append(swatch, label, " ", value);
  return item;
}

function tellValues(plot) {
  const index = plot.cursor.idx;
  for (const value of plot.figure.querySelectorAll("[data-places]")) {
    const found = value.dataset.places.split(",").map((i) => plot.data[i]?.[index]).find((one) => one != null);
    value.textContent = found === undefined || !value.dataset.places ? "" : found.toFixed(plot.chart.digits);
  }
}

function whenLooksChange(paint) {
  new ResizeObserver(() => { // its place narrows when a scroll bar appears
    if (!plots.length || !place.clientWidth || plots[0].width === place.clientWidth) return;
    for (const plot of plots) plot.setSize({ width: place.clientWidth, height: plot.height });
    paint();
  }).observe(place);
  for (const again of [matchMedia("(prefers-color-scheme: dark)"), document]) again.addEventListener(again === document ? "clock" : "change", paint);
}

// --- the cursor ---

function moveCursor(to) { // nameOf(x), of each page: what is said of a place on its axis
  const [plot] = plots, x = plot.data[0], [from, until] = [plot.scales.x.min, plot.scales.x.max];
  const shown = x.map((_, i) => i).filter((i) => x[i] >= from && x[i] <= until && plots.some((one) => one.data.slice(1).some((curve) => curve[i] != null)));
  const index = shown.indexOf(plot.cursor.idx);
  const next = shown.at(to === "first" ? 0 : to === "last" ? -1 : index < 0 ? (to > 0 ? 0 : -1) : Math.min(Math.max(index + to, 0), shown.length - 1));
  if (next === undefined) return;
  for (const one of plots) one.setCursor({ left: one.valToPos(x[next], "x"), top: 1 }, true, false);
  const told = plots.map((one) => {
    const parts = [...one.figure.querySelectorAll(".legend li")].filter((item) => item.lastChild.textContent);
    return parts.length ? `${one.chart.name}: ${parts.map((item) => item.textContent.trim()).join(", ")}` : "";
  });
  document.getElementById("at-cursor").textContent = `${nameOf(x[next])}. ${told.filter(Boolean).join(". ")}`;
}

const CURSOR_KEYS = {
  ArrowLeft: () => moveCursor(-1), ArrowRight: () => moveCursor(1), Home: () => moveCursor("first"), End: () => moveCursor("last"),
};

function listenToKeys(keys) {
  place.addEventListener("keydown", (event) => {
    if (!plots.length || event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
}

// --- the same as a table ---

function writeTable(heads, rows) { // a row: what stands first, then texts
  const head = document.createElement("thead"), body = document.createElement("tbody");
  head.insertRow().append(...heads.map((name) => Object.assign(document.createElement("th"), { textContent: name, scope: "col" })));
  for (const [named, ...cells] of rows) {
    const row = body.insertRow(), first = Object.assign(document.createElement("th"), { scope: "row" });
    first.append(named);
    row.append(first, ...cells.map((text, i) => Object.assign(document.createElement("td"), { textContent: text, className: i ? "n" : "" })));
    [...row.cells].forEach((cell, i) => { if (i) cell.dataset.label = heads[i]; });
  }
  table.querySelector("table").replaceChildren(head, body);
}
