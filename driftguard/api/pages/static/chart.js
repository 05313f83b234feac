// Draws one stream over time, on one time axis: acceptance, tokens per step, positions, speed, volume, K.
// What is shown is in the address: minutes, segment, and since and until where it is zoomed.
"use strict";

const GAP_BINS = 4, ANSWER_MILLISECONDS = 10_000;
const chosen = document.getElementById("segment");
const view = { minutes: 60, since: null, until: null }; // since and until in seconds, where it is zoomed
let series = null, drawn = "", asked = 0;

function seconds(at) {
  return Date.parse(at) / 1000;
}

function nameOf(x) {
  return clock(new Date(x * 1000));
}

function isolated(name) { // one in a right-to-left script, in a sentence from left to right
  return /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/.test(name) ? `\u2068${name}\u2069` : name;
}

function ratio(part, whole) {
  return whole ? part / whole : null;
}

// --- what is shown, in the address ---

function readAddress() {
  const told = new URLSearchParams(location.search);
  const choices = [...document.querySelectorAll("[data-minutes]")].map((button) => Number(button.dataset.minutes));
  const wanted = (Date.now() - Date.parse(place.dataset.reach)) / 60_000; // so that the newest record is in it
  view.minutes = Number(told.get("minutes")) || choices.find((minutes) => minutes >= Math.max(60, wanted * 1.1)) || choices.at(-1);
  const [since, until] = ["since", "until"].map((name) => seconds(told.get(name)));
  if (since < until) Object.assign(view, { since, until });
  if ([...chosen.options].some((option) => option.value === told.get("segment"))) chosen.value = told.get("segment");
}

function writeAddress() {
  const told = new URLSearchParams({ minutes: view.minutes });
  const first = [...chosen.options].find((option) => option.defaultSelected); // of an incident its first one
  if (chosen.value || first?.value) told.set("segment", chosen.value);
  if (view.since) for (const name of ["since", "until"]) told.set(name, new Date(view[name] * 1000).toISOString());
  history.replaceState(null, "", `?${told}`);
}

// --- the numbers: one x for all charts; undefined joins a line, null interrupts it ---

function linesOf(segment) {
  return series.lines.filter((line) => line.segment === (segment || null));
}

function times(lines) {
  const found = new Set();
  for (const line of lines) {
    line.points.forEach((point, i) => {
      found.add(seconds(point.at));
      const next = line.points[i + 1];
      if (!next || seconds(next.at) - seconds(point.at) > GAP_BINS * series.bin_seconds) found.add(seconds(point.at) + series.bin_seconds);
    });
  }
  return [...found].sort((a, b) => a - b);
}

function values(x, line, value) {
  const at = new Map(line.points.map((point) => [seconds(point.at), value(point)]));
  let last = null;
  return x.map((time) => {
    if (at.has(time)) {
      last = time;
      return at.get(time);
    }
    return last !== null && time - last <= series.bin_seconds && !at.has(time) && gapAfter(at, last) ? null : undefined;
  });
}

function gapAfter(at, time) {
  for (let bins = 1; bins <= GAP_BINS; bins++) if (at.has(time + bins * series.bin_seconds)) return false;
  return true;
}

// Each chart: its name, its curves {name, hue, line, value, ...}, how its values are written, and its range.
function charts() {
  const lines = linesOf(chosen.value);
  const others = new Set(lines.map((line) => line.draft_version)).size > 1;
  const named = (name, line) => (others ? `${name}, draft ${isolated(line.draft_version)}` : name);
  const single = (name, value, more = {}) => lines.map((line, i) => ({ name: named(name, line), hue: COLOURS[i % COLOURS.length], line, value, ...more }));
  const per_second = (count) => count / series.bin_seconds;
  const positions = Math.max(0, ...lines.flatMap((line) => line.points.map((p) => p.acceptance_per_position.length)));
  return [
    { name: "Acceptance", digits: 3, range: fitted(0, 1, 0.1), curves: acceptance(lines), band: baseline(), tall: true },
    { name: "Acceptance length", unit: "tokens per step", digits: 2, range: fitted(0, Infinity, 0.5), curves: single("tokens per step", (p) => p.acceptance_length) },
    { name: "Acceptance per position", digits: 3, range: fitted(0, 1, 0.1), missing: "Its records do not tell positions.",
      curves: Array.from({ length: positions }, (_, i) => lines.map((line) => ({ name: named(`position ${i + 1}`, line), hue: COLOURS[i % COLOURS.length], line, value: (p) => p.acceptance_per_position[i] ?? null }))).flat() },
    { name: "Tokens per second of a request", digits: 1, range: fitted(0, Infinity, 1), missing: "Its records do not tell the time per token.", curves: single("tokens per second", (p) => p.tokens_per_second) },
    { name: "Volume", unit: "per second", digits: 2, range: from0, curves: [
      ...single("requests", (p) => per_second(p.requests), { bars: true }),
      ...lines.map((line, i) => ({ name: named("draft tokens", line), hue: COLOURS[(i + 2) % COLOURS.length], line, value: (p) => per_second(p.drafted), scale: "tokens" }))] },
    { name: "K", unit: "draft tokens per step", digits: 2, range: from0, curves: single("draft tokens per step", (p) => ratio(p.drafted, p.steps), { stepped: true }) },
  ];
}

function acceptance(lines) {
  if (chosen.value) return lines.map((line) => ({ name: chosen.value, hue: COLOURS[0], line, value: (p) => p.acceptance }));
  const order = [...new Set(series.lines.map((line) => line.segment).filter((name) => name !== null))].sort();
  return series.lines.map((line) => ({
    name: line.segment ?? "all segments", line, value: (p) => p.acceptance,
    ...(line.segment === null ? { hue: colour("--quiet"), dash: [4, 4] } : { hue: COLOURS[order.indexOf(line.segment) % COLOURS.length] }),
  }));
}

function baseline() { // {rate, low, high}, or undefined
  return JSON.parse(document.getElementById("baselines").textContent)[chosen.value] || undefined;
}

// --- what happened ---

const CHANGES = { down: ["--bad", "acceptance fell"], up: ["--info", "acceptance rose"], slower: ["--bad", "tokens came slower"] };

function marks() {
  const within = (at) => series.since <= at && at <= series.until;
  const found = series.change_points.map((one) => ({
    at: seconds(one.at), shown: within(one.at), hue: CHANGES[one.direction][0], band: one.interval.map(seconds),
    bar: [seconds(one.opened_at), one.resolved_at ? seconds(one.resolved_at) : seconds(series.until)],
    text: CHANGES[one.direction][1], link: `${place.dataset.prefix}/incidents/${one.incident_id}`,
    more: [["between", one.interval[0]], ["and", one.interval[1]], ["; found", one.opened_at], ...(one.resolved_at ? [["; resolved", one.resolved_at]] : [])],
  }));
  for (const one of series.promotions) found.push({ at: seconds(one.at), shown: true, hue: "--good", text: `draft ${isolated(one.draft_version)} put into service`, more: [] });
  for (const at of series.server_starts) found.push({ at: seconds(at), shown: true, hue: "--warn", text: "server started", more: [] });
  return found.sort((a, b) => a.at - b.at).map((mark, i) => ({ ...mark, number: i + 1 }));
}

function listMarks(found) {
  const items = found.map((mark) => {
    const item = document.createElement("li"), name = document.createElement(mark.link ? "a" : "b");
    if (mark.link) name.href = mark.link;
    name.textContent = mark.text;
    item.append(name, " ", timeElement(new Date(mark.at * 1000).toISOString()));
    for (const [word, at] of mark.more) item.append(word.startsWith(";") ? `${word} ` : ` ${word} `, timeElement(at));
    return item;
  });
  document.getElementById("marks").replaceChildren(...items);
}

function paintBehind(plot) { // the baseline's interval, and where a change point may lie
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  if (plot.band) {
    const [low, high, rate] = ["low", "high", "rate"].map((name) => plot.valToPos(plot.band[name], "y", true));
    ctx.fillStyle = ctx.strokeStyle = colour("--good");
    ctx.globalAlpha = 0.2;
    ctx.fillRect(bbox.left, high, bbox.width, low - high);
    ctx.globalAlpha = 1;
    ctx.fillRect(bbox.left, rate, bbox.width, devicePixelRatio);
  }
  for (const mark of plot.marks) {
    ctx.fillStyle = colour(mark.hue);
    if (mark.band) {
      const [from, to] = mark.band.map((at) => plot.valToPos(at, "x", true));
      ctx.globalAlpha = 0.14;
      ctx.fillRect(from, bbox.top, Math.max(to - from, 1), bbox.height);
    }
    if (mark.bar) {
      const [from, to] = mark.bar.map((at) => plot.valToPos(at, "x", true));
      ctx.globalAlpha = 0.8;
      ctx.fillRect(from, bbox.top, to - from, 4 * devicePixelRatio);
    }
  }
  ctx.restore();
}

function paintMarks(plot) { // a line each, with the number that it has in the list
  const { ctx, bbox } = plot;
  ctx.save();
  for (const mark of plot.marks.filter((one) => one.shown)) {
    const x = plot.valToPos(mark.at, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = colour(mark.hue);
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (!plot.first) continue;
    ctx.font = `600 ${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    ctx.textBaseline = "bottom";
    ctx.fillText(mark.number, x, bbox.top - 2 * devicePixelRatio);
  }
  ctx.restore();
}

// --- drawing ---

function axisTimes(plot, splits) {
  const local = isLocal(), [first, second] = splits;
  let day = "";
  return splits.map((at) => {
    const [date, time] = stamp(new Date(at * 1000), local).split(" ");
    const short = second - first < 60 ? time : time.slice(0, 5);
    const changed = date !== day;
    day = date;
    if (second - first >= 86_400) return date.slice(5);
    return changed ? `${short}\n${date.slice(5)}` : short;
  });
}

function span() { // of the time axis: the data there is, up to now; or what was zoomed to
  if (view.since) return [view.since, view.until];
  const first = Math.min(...series.lines.flatMap((line) => line.points.slice(0, 1).map((point) => seconds(point.at))));
  return [Math.max(seconds(series.since), Number.isFinite(first) ? first : 0), seconds(series.until)];
}

function options(chart, first) {
  const axis = axisStyle(), narrow = place.clientWidth < NARROW, right = chart.curves.some((curve) => curve.scale);
  return {
    width: place.clientWidth, height: chart.tall ? 230 : 150, legend: { show: false },
    padding: [first ? 18 : 8, right ? null : AXIS, null, null], // so that the same times lie below each other
    cursor: {
      sync: { key: "time", setSeries: false }, drag: { x: true, y: false, setScale: false, dist: 4 }, y: false,
      bind: { dblclick: () => () => { zoom(null); return null; } },
    },
    tzDate: (at) => uPlot.tzDate(new Date(at * 1000), isLocal() ? Intl.DateTimeFormat().resolvedOptions().timeZone : "Etc/UTC"),
    scales: { x: { time: true, range: () => span() }, y: { range: chart.range }, tokens: { range: from0 } },
    axes: [
      { ...axis, size: 40, values: axisTimes, space: narrow ? 60 : 80 },
      { ...axis, size: AXIS, values: short, space: 30 },
      ...(right ? [{ ...axis, size: AXIS, side: 1, scale: "tokens", values: short, grid: { show: false }, space: 30 }] : []),
    ],
    series: [{}, ...chart.curves.map((curve) => ({
      scale: curve.scale ?? "y", stroke: curve.hue, width: 2, dash: curve.dash, points: { size: 4 },
      ...(curve.bars ? { paths: uPlot.paths.bars({ size: [0.8, 24] }), fill: curve.hue + "55", width: 1, points: { show: false } } : {}),
      ...(curve.stepped ? { paths: uPlot.paths.stepped({ align: 1 }) } : {}),
    }))],
    hooks: {
      drawClear: [paintBehind],
      draw: [paintMarks],
      setCursor: [tellValues],
      setSelect: [(plot) => {
        const { left, width } = plot.select;
        if (width < 4) return;
        plot.setSelect({ left: 0, width: 0 }, false);
        zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
      }],
    },
  };
}

function paint() {
  const lines = chosen.value ? linesOf(chosen.value) : series.lines;
  const x = times(lines), wanted = charts(), happened = marks();
  const layout = JSON.stringify([place.clientWidth < NARROW, isLocal(), matchMedia("(prefers-color-scheme: dark)").matches,
    wanted.map((chart) => chart.curves.map((curve) => [curve.name, curve.hue, curve.line.stream_id]))]);
  listMarks(happened);
  document.getElementById("no-data").hidden = x.length > 0;
  place.hidden = x.length === 0;
  if (layout !== drawn) build(wanted);
  drawn = layout;
  plots.forEach((plot, i) => {
    Object.assign(plot, { marks: happened, chart: wanted[i], band: wanted[i].band });
    plot.setData([x, ...wanted[i].curves.map((curve) => values(x, curve.line, curve.value))]);
    plot.figure.querySelector(".missing").hidden = !wanted[i].missing || wanted[i].curves.some((curve) => curve.line.points.some((p) => curve.value(p) != null));
    legend(plot);
  });
  document.getElementById("reset-zoom").hidden = !view.since;
  place.dataset.binSeconds = series.bin_seconds; // says that it is drawn, and how finely
  if (table.open) fillTable();
}

function build(wanted) {
  for (const plot of plots) plot.destroy();
  const others = document.createElement("details");
  others.append(Object.assign(document.createElement("summary"), { textContent: "Acceptance length, positions, speed, volume, K" }));
  others.dataset.fold = "charts";
  others.open = true;
  place.replaceChildren();
  plots = wanted.map((chart, i) => drawIn(i ? others : place, chart, options(chart, i === 0), { marks: [], band: chart.band, first: i === 0 }));
  place.append(others);
  show(place);
}

// --- zoom and keys ---

function zoom(range) {
  [view.since, view.until] = range ?? [null, null];
  writeAddress();
  for (const plot of plots) plot.setScale("x", {});
  draw();
}

const KEYS = {
  ...CURSOR_KEYS,
  "+": () => {
    const [plot] = plots, { min, max } = plot.scales.x, middle = plot.data[0][plot.cursor.idx] ?? (min + max) / 2;
    zoom([middle - (max - min) / 4, middle + (max - min) / 4]);
  },
  Escape: () => { if (view.since) zoom(null); },
};

// --- the same as a table ---

function fillTable() {
  const lines = linesOf(chosen.value), positions = Math.max(0, ...lines.flatMap((line) => line.points.map((p) => p.acceptance_per_position.length)));
  const number = (value, digits) => (value == null ? "–" : value.toFixed(digits));
  const heads = ["Time", "Draft", "Requests", "Draft tokens", "Acceptance", "Tokens per step", ...Array.from({ length: positions }, (_, i) => `Position ${i + 1}`), "Tokens/s", "K"];
  const rows = lines.flatMap((line) => line.points.map((p) => [p.at, line.draft_version, String(p.requests), String(p.drafted), number(p.acceptance, 3), number(p.acceptance_length, 2),
    ...Array.from({ length: positions }, (_, i) => number(p.acceptance_per_position[i], 3)), number(p.tokens_per_second, 1), number(ratio(p.drafted, p.steps), 2)]));
  const inside = rows.filter(([at]) => { const [from, to] = span(); return seconds(at) >= from - series.bin_seconds && seconds(at) <= to; }).sort((a, b) => (a[0] < b[0] ? 1 : -1));
  writeTable(heads, inside.map(([at, ...cells]) => [timeElement(at), ...cells]));
}

// --- asking the sidecar ---

async function draw() {
  const mine = ++asked, note = document.getElementById("not-read");
  const told = await numbers().catch((error) => error);
  if (mine !== asked) return;
  note.hidden = !(told instanceof Error);
  if (told instanceof Error) { // what was drawn stays
    note.textContent = `The charts could not be brought up to date: ${told.message}`;
  } else {
    series = told;
    paint();
  }
}

async function numbers() {
  const query = view.since
    ? new URLSearchParams({ since: new Date(view.since * 1000).toISOString(), until: new Date(view.until * 1000).toISOString() })
    : new URLSearchParams({ minutes: view.minutes });
  if (chosen.value) query.set("segment", chosen.value); // else it may be among those that are left out
  const answer = await fetch(`${place.dataset.prefix}/api/v1/streams/${place.dataset.stream}/acceptance?${query}`, { signal: AbortSignal.timeout(ANSWER_MILLISECONDS) });
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.detail);
  return told;
}

function press() {
  for (const button of document.querySelectorAll("[data-minutes]")) button.setAttribute("aria-pressed", String(Number(button.dataset.minutes) === view.minutes));
}

function start() {
  const choices = document.querySelector("[data-choices]");
  for (const hidden of [choices, document.getElementById("chart-keys")]) hidden.hidden = false;
  readAddress();
  choices.addEventListener("click", (event) => {
    const button = event.target.closest("[data-minutes]");
    if (!button) return;
    view.minutes = Number(button.dataset.minutes);
    press();
    zoom(null);
  });
  document.getElementById("reset-zoom").addEventListener("click", () => zoom(null));
  chosen.addEventListener("change", () => { writeAddress(); draw(); });
  table.addEventListener("toggle", () => { if (table.open && series) fillTable(); });
  whenLooksChange(() => { if (series) paint(); });
  listenToKeys(KEYS);
  document.addEventListener("refreshed", () => { if (!view.since || view.until * 1000 > Date.now()) draw(); });
  press();
  draw();
}

if (canDraw()) start();
