// Asks Prometheus what a panel asks, as Grafana's data source would.
import { FieldType } from "@grafana/data";

const MIN_STEP_SECONDS = 5; // what the data source would call its scrape interval
const POINTS = 200;

// What Grafana puts in for variables: `values` of the dashboard's own, All for every other.
export function filler(dashboard, values, range) {
  const step = stepSeconds(range);
  const builtIn = {
    __interval: `${step}s`,
    __rate_interval: `${Math.max(2 * MIN_STEP_SECONDS, 4 * MIN_STEP_SECONDS, step + MIN_STEP_SECONDS)}s`,
    __range: `${Math.ceil(range.end - range.start)}s`,
  };
  const everything = Object.fromEntries(dashboard.templating.list.map((item) => [item.name, item.allValue]));
  const known = { ...everything, ...values, ...builtIn };
  return (text) =>
    text.replace(/\$(\w+)/g, (_, name) => {
      if (known[name] === undefined) throw new Error(`nothing is known for $${name} in ${text}`);
      return known[name];
    });
}

export function stepSeconds({ start, end }) {
  return Math.max(MIN_STEP_SECONDS, Math.ceil((end - start) / POINTS));
}

async function ask(path, parameters) {
  const answer = await fetch(`/api/v1/${path}?${new URLSearchParams(parameters)}`);
  const document = await answer.json();
  if (document.status !== "success") throw new Error(`${parameters.query}: ${document.error}`);
  return document.data.result;
}

export async function rangeOf(scene, query, step = stepSeconds(scene.range)) {
  const start = Math.ceil(scene.range.start / step) * step;
  return ask("query_range", { query, start, end: scene.range.end, step });
}

// One DataFrame per series, or one per query where the target asks for a table.
export async function framesOf(scene, target, fill, several) {
  const query = fill(target.expr);
  if (target.instant) {
    const series = await ask("query", { query, time: scene.range.end });
    return target.format === "table" ? [table(target, series, several)] : series.map((item) => instant(target, item));
  }
  return (await rangeOf(scene, query)).map((item) => curve(target, item, stepSeconds(scene.range)));
}

function named(legend, labels) {
  if (!legend) return undefined;
  return legend.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? "");
}

function valueField(target, labels, values) {
  const config = { displayNameFromDS: named(target.legendFormat, labels) };
  return { name: "Value", type: FieldType.number, labels, config, values };
}

function number(text) {
  const value = Number(text.replace("Inf", "Infinity"));
  return Number.isNaN(value) ? null : value;
}

function curve(target, { metric, values }, step) {
  const time = { name: "Time", type: FieldType.time, config: { interval: 1000 * step }, values: values.map(([at]) => 1000 * at) };
  const value = valueField(target, metric, values.map(([, text]) => number(text)));
  return { refId: target.refId, fields: [time, value], length: values.length };
}

function instant(target, { metric, value: [at, text] }) {
  const time = { name: "Time", type: FieldType.time, config: {}, values: [1000 * at] };
  return { refId: target.refId, fields: [time, valueField(target, metric, [number(text)])], length: 1 };
}

function table(target, series, several) {
  const labels = [...new Set(series.flatMap((item) => Object.keys(item.metric)))].sort();
  const column = (name, type, values) => ({ name, type, config: {}, values });
  return {
    refId: target.refId,
    length: series.length,
    fields: [
      column("Time", FieldType.time, series.map((item) => 1000 * item.value[0])),
      ...labels.map((label) => column(label, FieldType.string, series.map((item) => item.metric[label] ?? ""))),
      column(several ? `Value #${target.refId}` : "Value", FieldType.number, series.map((item) => number(item.value[1]))),
    ],
  };
}
