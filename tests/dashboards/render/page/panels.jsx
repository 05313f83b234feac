// One component per kind of panel, made of what @grafana/ui has for it.
import { FieldType, VizOrientation, getFieldDisplayValues } from "@grafana/data";
import { BigValue, TimeSeries, VizRepeater } from "@grafana/ui";
import { TableNG } from "@grafana/ui/unstable";
import { StateTimeline } from "./timeline.jsx";
import { drawing } from "./marks.js";

function Graph({ panel, frames, marks, width, height, timeRange }) {
  const renderers = [{ fieldMap: {}, indicesOnly: [], init: (builder) => builder.addHook("draw", drawing(marks)) }];
  return (
    <TimeSeries
      frames={frames} width={width} height={height} timeRange={timeRange} timeZone="utc"
      legend={panel.options.legend} options={panel.options} renderers={renderers}
    />
  );
}

function Stat({ panel, frames, width, height, theme }) {
  const { options, fieldConfig } = panel;
  const getValues = () =>
    getFieldDisplayValues({
      data: frames, fieldConfig, reduceOptions: options.reduceOptions, replaceVariables: (text) => text, theme, timeZone: "utc",
    });
  const renderValue = ({ value, width, height, count }) => (
    <BigValue
      value={value.display} width={width} height={height} theme={theme} count={count} textMode={options.textMode}
      colorMode={options.colorMode} graphMode={options.graphMode} justifyMode={options.justifyMode}
    />
  );
  return (
    <VizRepeater
      getValues={getValues} renderValue={renderValue} width={width} height={height} source={frames} renderCounter={0}
      autoGrid orientation={VizOrientation.Auto} itemSpacing={3}
    />
  );
}

function Table({ panel, frames, width, height, timeRange }) {
  const [frame] = frames;
  return (
    <TableNG
      data={frame} width={width} height={height} sortBy={panel.options.sortBy} cellHeight={panel.options.cellHeight}
      noHeader={!panel.options.showHeader} showTypeIcons={panel.options.showTypeIcons} fieldConfig={panel.fieldConfig}
      timeRange={timeRange} enableVirtualization={false} structureRev={1}
    />
  );
}

const KINDS = { timeseries: Graph, stat: Stat, table: Table, "state-timeline": StateTimeline };

export function Content(props) {
  const Kind = KINDS[props.panel.type];
  if (!Kind) throw new Error(`${props.panel.title}: nothing draws a ${props.panel.type}`);
  const told = props.frames.flatMap((frame) => frame.fields.filter((field) => field.type !== FieldType.time));
  if (!told.some((field) => field.values.length)) {
    return <div className="empty">{props.panel.fieldConfig.defaults.noValue ?? "No data"}</div>;
  }
  return <Kind {...props} />;
}
