// Draws how a training goes, step by step. Its numbers are in the page, which page.js brings up to date.
"use strict";

let looks = "";

function told() {
  return JSON.parse(document.getElementById("curve").textContent);
}

function nameOf(step) {
  return `Step ${step}`;
}

function stepsOf(curve) {
  return [...new Set([curve.training, curve.held_out].flatMap((kind) => kind.points.map((point) => point.step)))].sort((a, b) => a - b);
}

function curvesOf(value) {
  return [{ name: "training", hue: COLOURS[0], kind: "training", value }, { name: "held out", hue: COLOURS[1], kind: "held_out", value }];
}

function wanted() {
  return [
    { name: "Loss", digits: 3, range: fitted(-Infinity, Infinity, 0.1), curves: curvesOf((point) => point.loss) },
    { name: "Single draft tokens kept", digits: 3, range: fitted(0, 1, 0.1), curves: curvesOf((point) => point.acceptance) },
  ];
}

function options(chart) {
  const axis = axisStyle();
  return {
    width: place.clientWidth, height: 170, legend: { show: false }, padding: [8, 16, null, null],
    cursor: { sync: { key: "step", setSeries: false }, drag: { x: false, y: false }, y: false },
    scales: { x: { time: false }, y: { range: chart.range } },
    axes: [{ ...axis, size: 30, values: short, space: 60 }, { ...axis, size: AXIS, values: short, space: 30 }],
    series: [{}, ...chart.curves.map((curve) => ({ stroke: curve.hue, width: 2, points: { size: 5 } }))],
    hooks: { setCursor: [tellValues] },
  };
}

function paint() {
  const curve = told(), steps = stepsOf(curve), now = JSON.stringify([matchMedia("(prefers-color-scheme: dark)").matches, place.clientWidth < NARROW]);
  document.getElementById("no-data").hidden = steps.length > 0;
  place.hidden = steps.length === 0;
  if (!steps.length) return;
  if (now !== looks) {
    for (const plot of plots) plot.destroy();
    place.replaceChildren();
    plots = wanted().map((chart) => drawIn(place, chart, options(chart), {}));
  }
  looks = now;
  for (const plot of plots) {
    plot.setData([steps, ...plot.chart.curves.map(({ kind, value }) => {
      const at = new Map(curve[kind].points.map((point) => [point.step, value(point)]));
      return steps.map((step) => at.get(step)); // undefined joins a line
    })]);
    legend(plot);
  }
  if (table.open) fillTable();
}

function fillTable() {
  const curve = told(), number = (value) => (value === undefined ? "–" : value.toFixed(3));
  const at = Object.fromEntries(["training", "held_out"].map((kind) => [kind, new Map(curve[kind].points.map((point) => [point.step, point]))]));
  writeTable(["Step", "Time", "Loss, training", "Loss, held out", "Kept, training", "Kept, held out"], stepsOf(curve).reverse().map((step) => {
    const [training, held] = [at.training.get(step), at.held_out.get(step)];
    return [String(step), clock(new Date((training ?? held).at)), number(training?.loss), number(held?.loss), number(training?.acceptance), number(held?.acceptance)];
  }));
}

if (canDraw()) {
  document.getElementById("chart-keys").hidden = false;
  table.addEventListener("toggle", () => { if (table.open) fillTable(); });
  listenToKeys(CURSOR_KEYS);
  whenLooksChange(paint);
  document.addEventListener("refreshed", paint);
  paint();
}
