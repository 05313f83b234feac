// State timelines: @grafana/ui has none, so their bands are drawn here, on its plot, axes, words and colours.
import { FieldType, formattedValueToString, getFieldDisplayName } from "@grafana/data";
import { AxisPlacement, ScaleDirection, ScaleOrientation } from "@grafana/schema";
import { UPlotChart, UPlotConfigBuilder, measureText, useTheme2 } from "@grafana/ui";
import { drawing } from "./marks.js";

const FONT_PX = 12;

export function StateTimeline({ panel, frames, marks, width, height, timeRange }) {
  const theme = useTheme2();
  const bands = frames.map((frame) => bandOf(frame, frames));
  const range = [timeRange.from.valueOf(), timeRange.to.valueOf()];
  const builder = new UPlotConfigBuilder("utc");
  const across = { scaleKey: "x", isTime: true, orientation: ScaleOrientation.Horizontal, direction: ScaleDirection.Right };
  const down = { scaleKey: "y", isTime: false, orientation: ScaleOrientation.Vertical, direction: ScaleDirection.Down };
  builder.addScale({ ...across, range: () => range });
  builder.addScale({ ...down, range: () => [0, bands.length] });
  builder.addAxis({ scaleKey: "x", isTime: true, placement: AxisPlacement.Bottom, timeZone: "utc", theme, grid: { show: false } });
  builder.addAxis({
    scaleKey: "y",
    placement: AxisPlacement.Left,
    theme,
    grid: { show: false },
    ticks: { show: false },
    splits: bands.map((_, index) => index + 0.5),
    values: bands.map((band) => band.name),
    size: Math.max(...bands.map((band) => measureText(band.name, FONT_PX).width)) + 30,
  });
  builder.addSeries({ scaleKey: "y", theme, pathBuilder: () => null, pointsBuilder: () => null, show: true });
  builder.addHook("draw", (u) => bands.forEach((band, place) => draw(u, band, place, panel, theme)));
  builder.addHook("draw", drawing(marks));
  return <UPlotChart data={[range, [0, 0]]} width={width} height={height} config={builder} />;
}

// {name, states: [{from, to, word, colour}]}: neighbours with one value are one state, a gap ends it.
function bandOf(frame, frames) {
  const time = frame.fields.find((field) => field.type === FieldType.time);
  const field = frame.fields.find((field) => field.type === FieldType.number);
  const step = time.config.interval;
  const states = [];
  time.values.forEach((at, index) => {
    const value = field.values[index];
    const last = states.at(-1);
    if (last && last.value === value && at - last.to < 1.5 * step) last.to = at;
    else {
      if (last && at - last.to < 1.5 * step) last.to = at;
      const shown = field.display(value);
      states.push({ value, from: at, to: at, word: formattedValueToString(shown), colour: shown.color });
    }
  });
  return { name: getFieldDisplayName(field, frame, frames), states };
}

function draw(u, band, place, panel, theme) {
  const { ctx, bbox } = u;
  const rowHeight = bbox.height / u.scales.y.max;
  const thick = rowHeight * panel.options.rowHeight;
  const top = bbox.top + place * rowHeight + (rowHeight - thick) / 2;
  ctx.save();
  ctx.font = `${FONT_PX * devicePixelRatio}px ${theme.typography.fontFamily}`;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  for (const { from, to, word, colour } of band.states) {
    const [left, right] = [from, to].map((at) => Math.min(bbox.left + bbox.width, Math.max(bbox.left, u.valToPos(at, "x", true))));
    ctx.globalAlpha = panel.fieldConfig.defaults.custom.fillOpacity / 100;
    ctx.fillStyle = colour;
    ctx.fillRect(left, top, right - left, thick);
    ctx.globalAlpha = 1;
    ctx.fillStyle = theme.colors.getContrastText(colour);
    if (ctx.measureText(word).width + 10 < right - left) ctx.fillText(word, left + 5, top + thick / 2);
  }
  ctx.restore();
}
