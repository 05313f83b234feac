// Applies a panel's field settings and transformations with Grafana's own functions.
import {
  FieldConfigOptionsRegistry,
  applyFieldOverrides,
  cacheFieldDisplayNames,
  dataLinksOverrideProcessor,
  displayNameOverrideProcessor,
  identityOverrideProcessor,
  numberOverrideProcessor,
  standardTransformers,
  standardTransformersRegistry,
  thresholdsOverrideProcessor,
  transformDataFrame,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
} from "@grafana/data";
import { lastValueFrom } from "rxjs";

const PROPERTIES = {
  displayName: displayNameOverrideProcessor,
  unit: unitOverrideProcessor,
  min: numberOverrideProcessor,
  max: numberOverrideProcessor,
  decimals: numberOverrideProcessor,
  thresholds: thresholdsOverrideProcessor,
  mappings: valueMappingsOverrideProcessor,
  links: dataLinksOverrideProcessor,
  color: identityOverrideProcessor,
  noValue: identityOverrideProcessor,
};
const CUSTOM = [
  "align", "axisSoftMax", "axisSoftMin", "cellOptions", "drawStyle", "fillOpacity", "inspect", "lineStyle", "lineWidth", "minWidth", "showPoints",
  "spanNulls", "stacking", "width",
];
// Of the panels that Grafana has: what it takes where the dashboard says nothing.
const DEFAULTS = {
  timeseries: { drawStyle: "line", lineInterpolation: "linear", pointSize: 5, axisPlacement: "auto", barAlignment: 0, barWidthFactor: 0.6 },
};

const registry = new FieldConfigOptionsRegistry(() => [
  ...Object.entries(PROPERTIES).map(([id, process]) => item(id, id, process, false)),
  ...CUSTOM.map((path) => item(`custom.${path}`, path, identityOverrideProcessor, true)),
]);

function item(id, path, process, isCustom) {
  return { id, path, name: id, process, isCustom, settings: {}, shouldApply: () => true, override: () => null, editor: () => null };
}

standardTransformersRegistry.setInit(() =>
  ["mergeTransformer", "organizeFieldsTransformer"].map((name) => {
    const transformation = standardTransformers[name];
    return { id: transformation.id, name: transformation.name, transformation: () => transformation };
  }),
);

// Refuses a setting that would not be drawn.
function known(panel) {
  const named = panel.fieldConfig.overrides.flatMap((override) => override.properties.map((property) => property.id));
  const set = Object.keys(panel.fieldConfig.defaults.custom ?? {}).map((name) => `custom.${name}`);
  const unknown = [...named, ...set].filter((id) => !registry.getIfExists(id));
  const transformations = (panel.transformations ?? []).filter(({ id }) => !standardTransformersRegistry.getIfExists(id));
  if (unknown.length || transformations.length) throw new Error(`${panel.title}: ${unknown} ${transformations.map((t) => t.id)}`);
}

export async function settled(panel, frames, theme) {
  known(panel);
  const context = { interpolate: (text) => text };
  const transformed = await lastValueFrom(transformDataFrame(panel.transformations ?? [], frames, context));
  const { defaults, overrides } = panel.fieldConfig;
  const custom = { ...DEFAULTS[panel.type], ...defaults.custom };
  const found = applyFieldOverrides({
    data: transformed,
    fieldConfig: { defaults: { ...defaults, custom }, overrides },
    fieldConfigRegistry: registry,
    replaceVariables: (text) => text,
    timeZone: "utc",
    theme,
  });
  cacheFieldDisplayNames(found);
  return found;
}
