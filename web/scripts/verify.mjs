// Rebuild into a temporary directory and compare with the committed assets byte by byte.
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";

const web = dirname(dirname(fileURLToPath(import.meta.url)));
const committed = join(web, "paceline_web", "static");

function files(root) {
  return readdirSync(root, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(root, join(entry.parentPath, entry.name)))
    .sort();
}

const rebuilt = mkdtempSync(join(tmpdir(), "paceline-web-"));
try {
  execFileSync(
    process.execPath,
    [join(web, "node_modules/vite/bin/vite.js"), "build", "--logLevel", "warn", "--outDir", rebuilt, "--emptyOutDir"],
    { cwd: web, stdio: "inherit" },
  );
  const names = [...new Set([...files(committed), ...files(rebuilt)])].sort();
  const read = (root, name) => {
    try {
      return readFileSync(join(root, name));
    } catch {
      return null;
    }
  };
  const differing = names.filter((name) => {
    const [before, after] = [read(committed, name), read(rebuilt, name)];
    return before === null || after === null || !before.equals(after);
  });
  if (differing.length > 0) {
    console.error(`The committed assets differ from a rebuild of the sources: ${differing.join(", ")}.`);
    console.error("Run `npm run build` in web/ and commit web/paceline_web/static.");
    process.exitCode = 1;
  } else {
    console.log(`${names.length} committed assets match a rebuild.`);
  }
} finally {
  rmSync(rebuilt, { recursive: true, force: true });
}
