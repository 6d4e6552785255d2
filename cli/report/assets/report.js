"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { ladder, tensors, states } = data;
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
      below: ["#dcebf7", "#a6cbe8", "#5b9bd0"], above: ["#fdc073", "#f07818", "#b83e04", "#6d1f03", "#2b0b02"],
    },
    dark: {
      equal: "#2a303a", none: "#12151a", missing: "#6c7682", mark: "#ffffff", declared: "#3f7d57",
      below: ["#21405e", "#2f6596", "#4b90cc"], above: ["#9a4a06", "#d6720f", "#f7a33c", "#ffd487", "#fff6dc"],
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
  const infinite = (ratio) => ratio === null || ratio === undefined;
  const colorOf = (cell) => {
    const found = ramps();
    if (!cell) return found.none;
    const [, state, ratio] = cell;
    if (ladder.values) return valueColor(found, state, ratio);
    if (states[state] === "missing") return found.missing;
    if (states[state] === "equal") return found.equal;
    if (states[state] === "declared") return found.declared;
    if (infinite(ratio)) return found.above[found.above.length - 1];
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

  // --- the heat map --------------------------------------------------------------------------------------
  const heat = $("heat");
  const LABELS = 46, GUTTER = 2, HEAD = 18, BAND = 40; // pixels: step labels, left margin, above, below
  const PAPER = 670; // pixels between the margins of A4
  const at = ladder.rows.map((row) => new Map(row.cells.map((cell) => [cell[0], cell])));
  const geometry = { width: 4, height: 24 };
  let cursor = null;

  const canvasOf = (canvas, width, height) => {
    const sharp = Math.min(Math.max(window.devicePixelRatio || 1, 1), 16000 / width); // what browsers can hold
    canvas.width = Math.round(width * sharp);
    canvas.height = Math.round(height * sharp);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    pen.clearRect(0, 0, width, height);
    return pen;
  };

  const hatch = (pen, x, y, width, height) => {
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width, height);
    pen.clip();
    pen.strokeStyle = ramps().none;
    pen.lineWidth = 1.2;
    pen.beginPath();
    for (let offset = -height; offset < width; offset += 5) {
      pen.moveTo(x + offset, y + height);
      pen.lineTo(x + offset + height, y);
    }
    pen.stroke();
    pen.restore();
  };

  const drawHeat = () => {
    const room = (printing.matches ? PAPER : $("scroll").clientWidth) - LABELS - GUTTER - 2;
    const [columns, rows] = [ladder.rows.length, ladder.steps.length];
    geometry.width = Math.min(Math.max(room / Math.max(columns, 1), printing.matches ? 0 : 2), 26);
    geometry.height = rows > 40 ? 8 : rows > 14 ? 14 : 26;
    const pen = canvasOf(heat, GUTTER + columns * geometry.width + 2, HEAD + rows * geometry.height + BAND);
    const { width, height } = geometry;
    const gap = width >= 6 ? 1 : 0;
    for (let x = 0; x < columns; x += 1)
      for (const [y, cell] of at[x]) {
        // without a gap cells meet at whole pixels, so that no seam shows between fractions of them
        const [left, right] = [x * width, (x + 1) * width - gap].map((value) => GUTTER + (gap ? value : Math.round(value)));
        const top = HEAD + y * height;
        pen.fillStyle = colorOf(cell);
        pen.fillRect(left, top, Math.max(right - left, 0.5), height - 1);
        if (!ladder.values && states[cell[1]] === "missing") hatch(pen, left, top, right - left, height - 1);
      }
    drawLabels(pen);
    for (const [x, y] of origins) outline(pen, x, y, ramps().mark, 1.2);
    base.width = heat.width;
    base.height = heat.height;
    base.getContext("2d").drawImage(heat, 0, 0);
    drawMarks(pen);
    Object.assign(heat.dataset, { width, height, left: GUTTER, top: HEAD });
  };

  const base = document.createElement("canvas"); // the map without what moves in it
  const drawMarks = (pen) => {
    if (cursor) outline(pen, ...cursor, ink("--accent"), 3);
    if (ladder.first) drawFirst(pen, ...ladder.first);
  };
  const redrawMarks = () => {
    const pen = heat.getContext("2d");
    pen.save();
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, heat.width, heat.height);
    pen.drawImage(base, 0, 0);
    pen.restore();
    drawMarks(pen);
  };

  const drawLabels = (pen) => {
    const { width, height } = geometry;
    const side = canvasOf($("gutter"), LABELS, HEAD + ladder.steps.length * height + BAND);
    side.font = pen.font = "11px system-ui, sans-serif";
    side.fillStyle = ink("--muted");
    side.textAlign = "right";
    side.textBaseline = pen.textBaseline = "middle";
    const every = Math.ceil(12 / height);
    ladder.steps.forEach((step, y) => {
      const named = step !== "init" && (y === 0 || ladder.steps[y - 1] === "init");
      if (named || y % every === 0) side.fillText(named ? `step ${step}` : step, LABELS - 7, HEAD + (y + 0.5) * height);
    });
    const bottom = HEAD + ladder.steps.length * height + 4;
    pen.textAlign = "left";
    let free = [0, 0];
    for (const [begin, end, kind] of bands()) {
      const [left, right] = [GUTTER + begin * width, GUTTER + end * width];
      pen.fillStyle = ink("--line");
      pen.fillRect(left, bottom, Math.max(right - left - 1, 1), 3);
      pen.fillStyle = ink("--muted");
      const text = kind.replace(/_/g, " ");
      const line = left >= free[0] ? 0 : left >= free[1] ? 1 : -1;
      const size = pen.measureText(text).width;
      if (line < 0 || right - left < 5 || left + size > GUTTER + ladder.rows.length * width + 2) continue;
      pen.fillText(text, left, bottom + 12 + 13 * line);
      free[line] = left + size + 10;
    }
  };

  const bands = () => {
    const found = [];
    ladder.rows.forEach((row, x) => {
      const last = found[found.length - 1];
      if (last && last[2] === row.kind) last[1] = x + 1;
      else found.push([x, x + 1, row.kind]);
    });
    return found;
  };

  const outline = (pen, x, y, color, weight) => {
    const { width, height } = geometry;
    pen.strokeStyle = color;
    pen.lineWidth = weight;
    pen.strokeRect(GUTTER + x * width - 0.5, HEAD + y * height - 0.5, Math.max(width, 2), height);
  };

  const drawFirst = (pen, x, y) => {
    const middle = GUTTER + (x + 0.5) * geometry.width;
    pen.fillStyle = ink("--red");
    pen.beginPath();
    pen.moveTo(middle - 5, 3);
    pen.lineTo(middle + 5, 3);
    pen.lineTo(middle, 12);
    pen.fill();
    pen.font = "600 11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const text = ladder.values ? "first not finite" : "first divergence";
    const fits = middle + 12 + pen.measureText(text).width < GUTTER + ladder.rows.length * geometry.width;
    pen.textAlign = fits ? "left" : "right";
    pen.fillText(text, middle + (fits ? 9 : -9), 8);
    pen.fillRect(middle - 0.5, 11, 1, HEAD - 11 + y * geometry.height);
    outline(pen, x, y, ink("--red"), 2.4);
  };

  const origins = [];
  if (!ladder.values)
    ladder.steps.forEach((_, y) => at.forEach((cells, x) => {
      const cell = cells.get(y);
      if (cell && states[cell[1]] === "origin") origins.push([x, y]);
    }));

  // --- the legend ----------------------------------------------------------------------------------------
  const drawScale = () => {
    const found = ramps();
    const pen = canvasOf($("scale"), 330, 34);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = ink("--muted");
    pen.textBaseline = "alphabetic";
    const [low, high] = ladder.values ? [-3, 4] : [-BELOW, ABOVE];
    const place = (value) => 8 + (314 * (value - low)) / (high - low);
    for (let x = 8; x < 322; x += 1) {
      const value = low + ((x - 8) / 314) * (high - low);
      pen.fillStyle = ladder.values ? colorOf([0, 0, 2 ** value]) : colorOf([0, 1, 10 ** value]);
      pen.fillRect(x, 16, 1.5, 12);
    }
    pen.fillStyle = ink("--muted");
    pen.textAlign = "center";
    for (const value of ladder.values ? [-3, 0, 4] : [-3, 0, 3, 6]) {
      const text = ladder.values ? `${2 ** value}×` : value === 0 ? "1 = allowed" : `1e${value}`;
      pen.textAlign = value === low ? "left" : value === high ? "right" : "center";
      pen.fillText(text, place(value), 11);
      pen.fillRect(place(value) - 0.5, 14, 1, 16);
    }
    $("keys").replaceChildren(...(ladder.values
      ? [key([0, 0, 1], "as its median"), key([0, 1, 1], "holds NaN or Inf"), key([0, 2], "no statistics")]
      : [key([0, 0], "equal in every bit"), key([0, 3, 1e3], "origin", true), key([0, 5, 0], "not compared"), ...(hasDeclared ? [key([0, 4, 2], "declared")] : [])]));
  };
  const hasDeclared = ladder.rows.some((row) => row.cells.some((cell) => states[cell[1]] === "declared"));
  const key = (cell, text, outlined) => {
    const box = document.createElement("canvas");
    const pen = canvasOf(box, 16, 14);
    pen.fillStyle = colorOf(cell);
    pen.fillRect(1, 1, 14, 12);
    if (!ladder.values && states[cell[1]] === "missing") hatch(pen, 1, 1, 14, 12);
    if (outlined) {
      pen.strokeStyle = ramps().mark;
      pen.lineWidth = 1.6;
      pen.strokeRect(1, 1, 14, 12);
    }
    const shown = document.createElement("span");
    shown.append(box, text);
    return shown;
  };

  // --- one cell in words ---------------------------------------------------------------------------------
  const figure = (value) => {
    if (infinite(value)) return "∞";
    if (value === 0) return "0";
    const size = Math.abs(value);
    return size >= 1e-3 && size < 1e4 ? String(Number(value.toPrecision(4))) : value.toExponential(2).replace("e+", "e");
  };
  const ROLES = {
    equal: "equal in every bit", within: "within what is allowed",
    receiver: "diverges, downstream of an origin", origin: "origin: diverges beyond what it was computed from explains",
    declared: "differs as declared", missing: "not compared",
  };
  const stepName = (y) => (ladder.steps[y] === "init" ? "init" : `step ${ladder.steps[y]}`);
  const nameOf = (row) => `${row.kind} ${row.name} ${row.slot}${row.call ? ` [${row.call}]` : ""}`;
  const cellId = (x, y) => `cell-${x}-${ladder.steps[y]}`;
  const cardOf = (x, y) => tensors.findIndex((tensor) => tensor.cell === `#${cellId(x, y)}`);

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
  const factsOf = (cell) => {
    if (!cell) return [["", "not recorded in this step"]];
    const [, state, ...numbers] = cell;
    if (ladder.values)
      return state === 2 ? [["", "no statistics"]] : [["norm", figure(numbers[1])], ["over its median", figure(numbers[0])], ["NaN or Inf", String(numbers[2])]];
    if (states[state] === "missing") return [["why", ladder.reasons[numbers[0]] || ""]];
    if (!numbers.length) return [];
    return [["× allowed", figure(numbers[0])], ["error", figure(numbers[1])], ["allowed", figure(numbers[2])]];
  };

  const select = (x, y, { follow = true } = {}) => {
    cursor = [Math.min(Math.max(x, 0), ladder.rows.length - 1), Math.min(Math.max(y, 0), ladder.steps.length - 1)];
    [x, y] = cursor;
    const row = ladder.rows[x], cell = at[x].get(y), card = cardOf(x, y);
    const panel = $("detail");
    const title = element("h3");
    title.append(element("span", nameOf(row), "mono"));
    const where = `${stepName(y)}${row.microbatch === null ? "" : `, microbatch ${row.microbatch}`}`;
    const state = cell ? (ladder.values ? ["finite", "holds NaN or Inf", "unknown"][cell[1]] : ROLES[states[cell[1]]]) : "not recorded in this step";
    const said = element("p", `${where} · ${state}`, "muted");
    said.id = "readout";
    panel.replaceChildren(title, said, facts(factsOf(cell)));
    if (card >= 0) {
      const link = element("a", "See where in the tensor the difference lies");
      link.href = `#tensor-${card}`;
      const line = element("p");
      line.append(link);
      panel.append(line);
    }
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
  heat.addEventListener("pointermove", (event) => {
    const found = under(event);
    $("hover").textContent = found ? inShort(...found) : "";
  });
  heat.addEventListener("pointerleave", () => { $("hover").textContent = ""; });
  const inShort = (x, y) => {
    const cell = at[x].get(y), ratio = cell && !ladder.values && cell.length > 3 ? `: ${figure(cell[2])} × allowed` : "";
    return `${stepName(y)} ${nameOf(ladder.rows[x])}${ratio}`;
  };
  heat.addEventListener("click", (event) => {
    const found = under(event);
    if (!found) return;
    select(...found);
    address();
  });
  const openCard = () => {
    const card = cursor ? cardOf(...cursor) : -1;
    if (card >= 0) location.hash = `tensor-${card}`;
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

  // --- finding a boundary --------------------------------------------------------------------------------
  const MOST_FOUND = 40;
  const worstStep = (x) => {
    let best = ladder.rows[x].cells.length ? ladder.rows[x].cells[0][0] : 0, most = -1;
    for (const [y, state, ratio] of ladder.rows[x].cells) {
      const weight = ladder.values ? (state === 1 ? 1e30 : Math.abs(Math.log2(ratio || 1))) : states[state] === "missing" ? 0 : infinite(ratio) ? (states[state] === "equal" ? 0 : 1e30) : ratio;
      if (weight > most) [best, most] = [y, weight];
    }
    return best;
  };
  const search = $("search"), found = $("found");
  const find = () => {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    found.hidden = !wanted.length;
    if (!wanted.length) return;
    const fitting = [];
    for (let x = 0; x < ladder.rows.length && fitting.length <= MOST_FOUND; x += 1)
      if (wanted.every((word) => nameOf(ladder.rows[x]).toLowerCase().includes(word))) fitting.push(x);
    found.replaceChildren(...fitting.slice(0, MOST_FOUND).map((x) => {
      const y = worstStep(x), link = element("a", nameOf(ladder.rows[x]));
      link.href = `#${cellId(x, y)}`;
      const microbatch = ladder.rows[x].microbatch;
      link.append(element("span", `${stepName(y)}${microbatch === null ? "" : ` mb ${microbatch}`}`));
      return link;
    }));
    if (!fitting.length) found.append(element("p", "no boundary of this page has such a name", "muted"));
    if (fitting.length > MOST_FOUND) found.append(element("p", "… more: type further words", "muted"));
  };
  search.addEventListener("input", find);
  found.addEventListener("click", () => { found.hidden = true; });
  document.addEventListener("click", (event) => { if (!event.target.closest(".find")) found.hidden = true; });

  // --- links to cells ------------------------------------------------------------------------------------
  const follow = () => {
    const card = /^#tensor-\d+$/.test(location.hash) && $(location.hash.slice(1));
    if (card) {
      card.open = true;
      card.scrollIntoView();
      return;
    }
    const parts = /^#cell-(\d+)-(\w+)$/.exec(location.hash);
    if (!parts) return;
    const y = ladder.steps.findIndex((step) => String(step) === parts[2]);
    if (y < 0 || Number(parts[1]) >= ladder.rows.length) return;
    select(Number(parts[1]), y);
    heat.focus({ preventScroll: true });
    $("ladder").scrollIntoView();
  };
  addEventListener("hashchange", follow);
  document.addEventListener("click", (event) => { // the same address again is no change of it
    const link = event.target.closest("a[href^='#cell-'], a[href^='#tensor-']");
    if (link && link.hash === location.hash) follow();
  });

  // --- maps of tensors -----------------------------------------------------------------------------------
  const NOT_FINITE = 9999, SPAN = 80; // twentieths of a decade: four decades below the worst block
  const LEFT = 6, TOP = 6;
  const shade = (level, most) => {
    const found = ramps();
    if (level === null) return found.equal;
    if (level === NOT_FINITE) return found.mark;
    return between([found.below[0], found.below[1], ...found.above.slice(0, 4)], 1 - (most - level) / SPAN);
  };
  const short = (level) => (10 ** (level / 20)).toExponential(1).replace("e+", "e");
  const drawMap = (canvas) => {
    const tensor = tensors[canvas.dataset.tensor];
    const [rows, columns] = tensor.grid;
    const side = tensor.parts.length ? 78 : 6;
    const room = Math.max(canvas.parentElement.clientWidth - LEFT - side, 120);
    const width = Math.max(Math.min(room / columns, 22), 2);
    const height = rows === 1 ? 34 : Math.max(Math.min(width, 300 / rows, 22), 3);
    const pen = canvasOf(canvas, LEFT + columns * width + side, TOP * 2 + rows * height + (rows === 1 && tensor.parts.length ? 14 : 0));
    const finite = tensor.blocks.filter((level) => level !== null && level !== NOT_FINITE);
    const most = finite.length ? Math.max(...finite) : 0;
    tensor.blocks.forEach((level, number) => {
      pen.fillStyle = shade(level, most);
      pen.fillRect(LEFT + (number % columns) * width, TOP + Math.floor(number / columns) * height, width + 0.4, height + 0.4);
    });
    pen.strokeStyle = ink("--line");
    pen.strokeRect(LEFT - 0.5, TOP - 0.5, columns * width + 1, rows * height + 1);
    drawParts(pen, tensor, columns * width, rows * height);
    drawRamp(canvas, most);
    canvas.tensor = { width, height, most };
  };
  const drawParts = (pen, tensor, wide, high) => {
    pen.font = "10.5px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    let [freeDown, freeRight] = [0, 0];
    for (const { label, rows, columns } of tensor.parts) {
      const [left, right] = columns.map((value) => LEFT + (wide * value) / tensor.columns);
      const [top, bottom] = rows.map((value) => TOP + (high * value) / tensor.rows);
      pen.strokeStyle = ramps().mark;
      pen.lineWidth = 1;
      pen.strokeRect(left, top, right - left, bottom - top);
      pen.fillStyle = ink("--muted");
      const inside = columns[0] > 0 || columns[1] < tensor.columns;
      if (!inside && (top + bottom) / 2 - 6 >= freeDown) {
        pen.fillText(label, LEFT + wide + 6, (top + bottom) / 2, 72);
        freeDown = (top + bottom) / 2 + 6;
      } else if (inside && tensor.rows === 1 && left >= freeRight) {
        pen.fillText(label, left + 1, bottom + 9);
        freeRight = left + pen.measureText(label).width + 8;
      } else if (inside && tensor.rows > 1) {
        const text = pen.measureText(label).width;
        if (text + 8 > right - left) continue;
        pen.fillStyle = ink("--bg");
        pen.fillRect(left + 3, top + 3, text + 6, 14);
        pen.fillStyle = ink("--ink");
        pen.fillText(label, left + 6, top + 10.5);
      }
    }
  };
  const drawRamp = (canvas, most) => {
    const line = canvas.closest("figure").querySelector(".ramp");
    const box = document.createElement("canvas");
    const pen = canvasOf(box, 120, 10);
    for (let x = 0; x < 120; x += 1) {
      pen.fillStyle = shade(most - SPAN + (x / 119) * SPAN, most);
      pen.fillRect(x, 0, 1.5, 10);
    }
    line.replaceChildren(short(most - SPAN), box, short(most));
  };
  const maps = [...document.querySelectorAll("canvas.error")];
  for (const canvas of maps) canvas.closest("details").addEventListener("toggle", () => drawMap(canvas));
  for (const canvas of maps)
    canvas.addEventListener("pointermove", (event) => {
      const tensor = tensors[canvas.dataset.tensor], box = canvas.getBoundingClientRect();
      const [rows, columns] = tensor.grid, { width, height } = canvas.tensor;
      const x = Math.floor((event.clientX - box.left - LEFT) / width), y = Math.floor((event.clientY - box.top - TOP) / height);
      const output = canvas.closest("figure").querySelector(".at");
      if (x < 0 || y < 0 || x >= columns || y >= rows) return void (output.textContent = "");
      const range = (number, of, count) => {
        const [first, last] = [Math.ceil((number * count) / of), Math.ceil(((number + 1) * count) / of) - 1];
        return first >= last ? `${first}` : `${first}–${last}`;
      };
      const level = tensor.blocks[y * columns + x];
      const holder = tensor.parts.find((part) => part.rows[0] <= (y * tensor.rows) / rows && (y * tensor.rows) / rows < part.rows[1] && part.columns[0] <= (x * tensor.columns) / columns && (x * tensor.columns) / columns < part.columns[1]);
      const size = level === null ? "equal" : level === NOT_FINITE ? "not finite in one run" : short(level);
      output.textContent = `[${tensor.rows > 1 ? `${range(y, rows, tensor.rows)}, ` : ""}${range(x, columns, tensor.columns)}]: ${size}${holder ? `, ${holder.label}` : ""}`;
    });

  // --- all of it -----------------------------------------------------------------------------------------
  const drawAll = () => {
    drawHeat();
    drawScale();
    maps.forEach(drawMap);
  };
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(drawAll);
  });
  const turn = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    drawAll();
  };
  $("theme").addEventListener("click", turn);
  prefersDark.addEventListener("change", drawAll);
  printing.addEventListener("change", drawAll);
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input")) {
      if (event.key === "Escape" && event.target === search) {
        search.value = "";
        find();
        heat.focus();
      }
      return;
    }
    if (event.key === "n") toOrigin(1);
    else if (event.key === "p") toOrigin(-1);
    else if (event.key === "d") turn();
    else if (event.key === "/") search.focus();
    else return;
    event.preventDefault();
  });
  for (const button of document.querySelectorAll(".copy"))
    button.addEventListener("click", () => {
      const line = button.parentElement.querySelector("code");
      const done = () => { button.textContent = "copied"; };
      const mark = () => getSelection().selectAllChildren(line);
      if (navigator.clipboard) navigator.clipboard.writeText(line.textContent).then(done, mark);
      else mark();
    });
  drawAll();
  if (ladder.first) select(...ladder.first);
  follow();
})();
