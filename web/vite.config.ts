import { defineConfig } from "vitest/config";

export default defineConfig({
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  build: {
    outDir: "paceline_web/static",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    // No data: URLs, so that the content security policy can be strict.
    assetsInlineLimit: 0,
  },
  // `npm run dev` against a server of `paceline server` or `make demo`.
  server: { proxy: { "/api": "http://127.0.0.1:8470" } },
  // The machine may be busy, and no test asserts its duration.
  test: { include: ["src/**/*.test.ts"], testTimeout: 60_000 },
});
