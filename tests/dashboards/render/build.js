import { build } from "esbuild";

await build({
  entryPoints: ["page/main.jsx"],
  bundle: true,
  format: "iife",
  jsx: "automatic",
  outdir: "build",
  minify: true,
  define: { "process.env.NODE_ENV": '"production"', global: "globalThis" },
  loader: { ".svg": "dataurl", ".ttf": "empty", ".woff": "empty", ".woff2": "empty", ".png": "empty" },
  logLevel: "warning",
});
