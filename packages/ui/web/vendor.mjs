// Copy Preact to where the page loads it: without source maps, and with the path of its other module.
import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";

const preact = new URL("node_modules/preact/", import.meta.url);
const vendor = new URL("../src/lightspan_ui/static/vendor/", import.meta.url);
mkdirSync(vendor, { recursive: true });
copyFileSync(new URL("LICENSE", preact), new URL("LICENSE", vendor));
for (const [from, to] of [["dist/preact.mjs", "preact.js"], ["hooks/dist/hooks.mjs", "hooks.js"]]) {
  const code = readFileSync(new URL(from, preact), "utf8")
    .replace('from"preact"', 'from"./preact.js"')
    .replace(/\/\/# sourceMappingURL=.*/, "")
    .trimEnd();
  writeFileSync(new URL(to, vendor), `${code}\n`);
}
