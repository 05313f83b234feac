// Draws one dashboard. A scene is {dashboard, values, range: {start, end}} (seconds since 1970).
import { ThemeContext, createTheme, dateTime } from "@grafana/data";
import { GlobalStyles, PanelChrome } from "@grafana/ui";
import { createRoot } from "react-dom/client";
import { settled } from "./fields.js";
import { marksOf } from "./marks.js";
import { Content } from "./panels.jsx";
import { filler, framesOf } from "./queries.js";

const COLUMNS = 24;
const LINE_PX = 30;
const GAP_PX = 8;

const theme = createTheme({ colors: { mode: "dark" } });

function box({ x, y, w, h }, width) {
  const column = (width - (COLUMNS - 1) * GAP_PX) / COLUMNS;
  const span = (count, size) => count * size + (count - 1) * GAP_PX;
  return { left: x * (column + GAP_PX), top: y * (LINE_PX + GAP_PX), width: span(w, column), height: span(h, LINE_PX) };
}

async function loaded(scene, panel, fill) {
  if (panel.type === "row") return { panel };
  const fetched = await Promise.all(panel.targets.map((target) => framesOf(scene, target, fill, panel.targets.length > 1)));
  return { panel, frames: await settled(panel, fetched.flat(), theme) };
}

function Panel({ panel, frames, marks, timeRange, width }) {
  const { width: across, height, ...place } = box(panel.gridPos, width);
  const style = { position: "absolute", ...place, width: across, height };
  if (panel.type === "row") return <h2 style={style}>{panel.title}</h2>;
  return (
    <div style={style}>
      <PanelChrome title={panel.title} description={panel.description} width={across} height={height} padding={panel.type === "table" ? "none" : "md"}>
        {(width, height) => <Content {...{ panel, frames, marks, timeRange, theme, width, height }} />}
      </PanelChrome>
    </div>
  );
}

function Header({ dashboard, values, timeRange }) {
  const variables = dashboard.templating.list.filter((item) => item.name !== "sidecar");
  const shown = (item) => (item.type === "datasource" ? "Prometheus" : values[item.name] ?? "All");
  return (
    <header>
      <h1>{dashboard.title}</h1>
      <p>
        {variables.map((item) => <span key={item.name}><b>{item.label}</b> {shown(item)}</span>)}
        {dashboard.annotations.list.map((item) => <span key={item.name}><i style={{ background: item.iconColor }} />{item.name}</span>)}
        <span><b>{timeRange.from.utc().format("HH:mm:ss")} to {timeRange.to.utc().format("HH:mm:ss")} UTC</b></span>
      </p>
    </header>
  );
}

function Dashboard({ scene, panels, marks, timeRange, width }) {
  const bottom = Math.max(...panels.map(({ panel }) => panel.gridPos.y + panel.gridPos.h));
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Header dashboard={scene.dashboard} values={scene.values} timeRange={timeRange} />
      <main style={{ position: "relative", height: bottom * (LINE_PX + GAP_PX) }}>
        {panels.map((item) => <Panel key={item.panel.id} {...item} {...{ marks, timeRange, width }} />)}
      </main>
    </ThemeContext.Provider>
  );
}

async function draw(scene) {
  const { dashboard, range } = scene;
  const fill = filler(dashboard, scene.values, range);
  const [from, to] = [dateTime(1000 * range.start), dateTime(1000 * range.end)];
  const timeRange = { from, to, raw: { from, to } };
  const marks = await marksOf(scene, dashboard, fill);
  const panels = await Promise.all(dashboard.panels.map((panel) => loaded(scene, panel, fill)));
  const place = document.getElementById("dashboard");
  createRoot(place).render(<Dashboard {...{ scene, panels, marks, timeRange, width: place.clientWidth }} />);
}

window.draw = draw;
