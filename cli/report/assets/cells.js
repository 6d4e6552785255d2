// --- one cell in words ---------------------------------------------------------------------------------
// as numbers.number and numbers.times write them
const figure = (value) => {
  if (unbounded(value)) return "∞";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e5) return String(value);
  if (size >= 1e-3 && size < 1e4) return String(Number(value.toPrecision(4)));
  const [mantissa, exponent] = value.toExponential(3).split("e");
  return `${Number(mantissa)}e${Number(exponent)}`;
};
const times = (value) =>
  !unbounded(value) && Math.abs(value) >= 1e3 && Math.abs(value) < 1e6
    ? Math.round(Number(value.toPrecision(4))).toLocaleString("en-US")
    : figure(value);
const ROLES = {
  equal: "equal in every bit", within: "within what is allowed",
  receiver: "diverges, downstream of an origin", origin: "origin: diverges beyond what it was computed from explains",
  declared: "differs as declared", missing: "not compared",
};
const VALUES = ["finite", "holds NaN or Inf", "no statistics"];
const stateOf = (cell) => (cell ? (ladder.values ? VALUES[cell[1]] : ROLES[states[cell[1]]]) : "not recorded in this step");
const stepName = (y) => ({ init: "init", resumed: "as it was resumed" }[ladder.steps[y]] || `step ${ladder.steps[y]}`);
const nameOf = (row) => `${row.kind} ${row.name} ${row.slot}${row.call ? ` [${row.call}]` : ""}`;
const cellId = (x, y) => `cell-${x}-${ladder.steps[y]}`;
const cardOf = (x, y) => tensors.findIndex((tensor) => tensor.cell === `#${cellId(x, y)}`);

const factsOf = (cell) => {
  if (!cell) return [];
  const [, state, ...numbers] = cell;
  if (ladder.values)
    return state === 2 ? [] : [["norm", figure(numbers[1])], ["over its median", figure(numbers[0])], ["NaN or Inf", String(numbers[2])]];
  if (states[state] === "missing") return [["why", ladder.reasons[numbers[0]] || ""]];
  if (!numbers.length) return [];
  return [["× allowed", times(numbers[0])], ["error", figure(numbers[1])], ["allowed", figure(numbers[2])]];
};

// --- the command that shows a boundary's values --------------------------------------------------------
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
const showing = (row, step) => {
  const began = recordings.filter(({ begins }) => begins === null || step === "resumed" || step >= begins);
  const { path, offset } = began[began.length - 1];
  const there = typeof step === "number" ? step - offset : "init";
  return `trace show ${quoted(path)} --step ${there} --kind ${row.kind} --name ${quoted(row.name)} --values`;
};
const commandOf = (text) => {
  const line = element("div", undefined, "command"), box = element("pre"), button = element("button", "copy", "ghost copy");
  button.type = "button";
  box.append(element("code", text));
  line.append(box, button);
  return line;
};

// --- choosing a cell -----------------------------------------------------------------------------------
const select = (x, y, { follow = true } = {}) => {
  cursor = [Math.min(Math.max(x, 0), ladder.rows.length - 1), Math.min(Math.max(y, 0), ladder.steps.length - 1)];
  [x, y] = cursor;
  const row = ladder.rows[x], cell = at[x].get(y), card = cardOf(x, y);
  const panel = $("detail");
  const title = element("h3");
  title.append(element("span", nameOf(row), "mono"));
  const where = `${stepName(y)}${row.microbatch === null ? "" : `, microbatch ${row.microbatch}`}`;
  const said = element("p", `${where} · ${stateOf(cell)}`, "muted");
  said.id = "readout";
  const link = element("a", "link", "permalink");
  link.href = `#${cellId(x, y)}`;
  link.title = "the address of this boundary in this page";
  title.append(link);
  panel.replaceChildren(title, said, facts(factsOf(cell)));
  if (card >= 0) {
    const map = element("a", "See where in the tensor the difference lies");
    map.href = `#tensor-${card}`;
    const line = element("p");
    line.append(map);
    panel.append(line);
  }
  if (cell) panel.append(commandOf(showing(row, ladder.steps[y])));
  panel.dataset.cell = cellId(x, y);
  redrawMarks();
  if (follow) keepInView(x);
};
const keepInView = (x) => {
  const box = $("scroll"), left = LABELS + GUTTER + x * geometry.width;
  if (left < box.scrollLeft + LABELS + 4 || left > box.scrollLeft + box.clientWidth - 20)
    box.scrollLeft = left - box.clientWidth / 2;
};
const address = () => history.replaceState(null, "", `#${cellId(...cursor)}`);
const under = (event) => {
  const box = heat.getBoundingClientRect();
  const x = Math.floor((event.clientX - box.left - GUTTER) / geometry.width);
  const y = Math.floor((event.clientY - box.top - HEAD) / geometry.height);
  return x >= 0 && x < ladder.rows.length && y >= 0 && y < ladder.steps.length ? [x, y] : null;
};
const tip = $("tip");
const showTip = (lines, x, y) => {
  tip.replaceChildren(...lines.map(([text, kind]) => element("span", text, kind)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(Math.min(x + 14, innerWidth - width - 8), 8)}px`;
  tip.style.top = `${y + height + 22 > innerHeight ? Math.max(y - height - 12, 4) : y + 16}px`;
};
const hideTip = () => { tip.hidden = true; };
heat.addEventListener("pointermove", (event) => {
  const found = event.pointerType === "touch" ? null : under(event);
  if (found) showTip(inShort(...found), event.clientX, event.clientY);
  else hideTip();
});
heat.addEventListener("pointerleave", hideTip);
const inShort = (x, y) => {
  const row = ladder.rows[x], cell = at[x].get(y);
  const part = row.microbatch === null ? "" : `, microbatch ${row.microbatch}`;
  return [
    [nameOf(row), "mono"],
    [`${stepName(y)}${part} · ${stateOf(cell)}`, "muted"],
    ...factsOf(cell).filter(([name]) => name).map(([name, value]) => [`${name} ${value}`]),
  ];
};
heat.addEventListener("click", (event) => {
  const found = under(event);
  if (!found) return;
  select(...found);
  address();
});
const openCard = () => {
  const card = cursor ? cardOf(...cursor) : -1;
  if (card < 0) return;
  location.hash = `tensor-${card}`;
  $(`tensor-${card}`).querySelector("summary").focus({ preventScroll: true });
};
const toOrigin = (step) => {
  if (!origins.length) return;
  const now = origins.findIndex(([x, y]) => cursor && x === cursor[0] && y === cursor[1]);
  const next = now < 0 ? (step > 0 ? 0 : origins.length - 1) : (now + step + origins.length) % origins.length;
  select(...origins[next]);
  address();
};
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
heat.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const from = cursor || ladder.first || [0, 0];
  if (MOVES[event.key]) {
    const [dx, dy] = MOVES[event.key], far = event.shiftKey ? 10 : 1;
    if (cursor) select(from[0] + dx * far, from[1] + dy * far);
    else select(...from);
  } else if (event.key === "Home") select(0, from[1]);
  else if (event.key === "End") select(ladder.rows.length - 1, from[1]);
  else if (event.key === "Enter") return openCard();
  else return;
  address();
  event.preventDefault();
});
