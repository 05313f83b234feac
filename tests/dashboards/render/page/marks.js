// A dashboard's annotations, as lines and stretches on the time axis of every graph.
import { rangeOf } from "./queries.js";

// [{name, colour, from, to}] in milliseconds; `to` equals `from` where it is a moment.
export async function marksOf(scene, dashboard, fill) {
  const found = await Promise.all(dashboard.annotations.list.map((item) => marks(scene, item, fill)));
  const [start, end] = [1000 * scene.range.start, 1000 * scene.range.end];
  return found.flat().filter(({ from, to }) => to >= start && from <= end);
}

async function marks(scene, item, fill) {
  const step = parseInt(item.step, 10);
  const series = await rangeOf(scene, fill(item.expr), step);
  const of = (from, to) => ({ name: item.name, colour: item.iconColor, from, to });
  if (item.useValueForTime) {
    const moments = new Set(series.flatMap(({ values }) => values.map(([, text]) => Number(text))));
    return [...moments].map((at) => of(at, at));
  }
  return series.flatMap(({ values }) => stretches(values.map(([at]) => at), step)).map(([from, to]) => of(1000 * from, 1000 * to));
}

function stretches(times, step) {
  const found = [];
  for (const at of times) {
    const last = found.at(-1);
    if (last && at - last[1] <= step) last[1] = at;
    else found.push([at, at]);
  }
  return found;
}

// A hook for uPlot: draws them over the curves.
export function drawing(marked) {
  return (u) => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const { colour, from, to } of marked) {
      const [left, right] = [from, to].map((at) => Math.round(u.valToPos(at, "x", true)));
      ctx.fillStyle = ctx.strokeStyle = colour;
      if (right > left) {
        ctx.globalAlpha = 0.1;
        ctx.fillRect(left, bbox.top, right - left, bbox.height);
        ctx.globalAlpha = 1;
      }
      ctx.lineWidth = 1.5;
      ctx.setLineDash([5, 4]);
      for (const x of new Set([left, right])) {
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
    }
    ctx.restore();
  };
}
