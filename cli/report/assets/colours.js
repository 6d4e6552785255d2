const data = JSON.parse(document.getElementById("data").textContent);
const { ladder, tensors, states, charts, recordings } = data;
const $ = (id) => document.getElementById(id);
const root = document.documentElement;

// --- theme ---------------------------------------------------------------------------------------------
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const printing = matchMedia("print");
const isDark = () =>
  !printing.matches && (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
const probe = document.createElement("i"); // resolves a colour of the style sheet for canvases
probe.hidden = true;
document.body.append(probe);
const ink = (name) => {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
};

const RAMPS = {
  light: {
    equal: "#e6e9ed", none: "#ffffff", missing: "#9aa3ad", mark: "#111418", declared: "#8fbf9f",
    below: ["#cbe2f6", "#9cc5e7", "#5b9bd0"], above: ["#fdc073", "#f07818", "#b83e04", "#6d1f03", "#2b0b02"],
    spread: ["#fff3df", "#fdcf92", "#f58f35", "#c64a08", "#7a2504"],
  },
  dark: {
    equal: "#2a303a", none: "#12151a", missing: "#6c7682", mark: "#ffffff", declared: "#3f7d57",
    below: ["#21405e", "#2f6596", "#4b90cc"], above: ["#9a4a06", "#d6720f", "#f7a33c", "#ffd487", "#fff6dc"],
    spread: ["#3d2610", "#7d4310", "#c96b12", "#f7a33c", "#ffe2ab"],
  },
};
const ramps = () => RAMPS[isDark() ? "dark" : "light"];
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const between = (stops, share) => {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  const [x, y] = [rgb(stops[low]), rgb(stops[low + 1])];
  return `rgb(${x.map((value, n) => Math.round(value + (y[n] - value) * (at - low))).join(",")})`;
};

// --- what a cell's colour means ------------------------------------------------------------------------
const BELOW = 3, ABOVE = 6; // decades of error over allowance on either side of 1
const unbounded = (ratio) => ratio === null || ratio === undefined;
const colorOf = (cell) => {
  const found = ramps();
  if (!cell) return found.none;
  const [, state, ratio] = cell;
  if (ladder.values) return valueColor(found, state, ratio);
  if (states[state] === "missing") return found.missing;
  if (states[state] === "equal") return found.equal;
  if (states[state] === "declared") return found.declared;
  if (unbounded(ratio)) return found.above[found.above.length - 1];
  if (ratio <= 1) return between(found.below, 1 + Math.log10(Math.max(ratio, 1e-9)) / BELOW);
  return between(found.above, Math.log10(ratio) / ABOVE);
};
const valueColor = (found, state, ratio) => {
  if (state === 2) return found.missing;
  if (state === 1) return found.above[found.above.length - 1];
  const octaves = Math.log2(ratio || 1);
  if (Math.abs(octaves) < 0.01) return found.equal;
  return octaves < 0 ? between([found.equal, ...found.below], -octaves / 3) : between([found.equal, ...found.above], octaves / 4);
};

// --- elements ------------------------------------------------------------------------------------------
const element = (tag, text, kind) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
const facts = (pairs) => {
  const list = element("dl", undefined, "facts");
  for (const [name, value] of pairs) {
    const line = element("div");
    line.append(element("dt", name), element("dd", value));
    list.append(line);
  }
  return list;
};
