// --- the heat map --------------------------------------------------------------------------------------
const heat = $("heat");
const LABELS = ladder.resumed === null ? 46 : 60, GUTTER = 2, HEAD = 18, BAND = 40; // pixels: step labels, left margin, above, below
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

const hatch = (pen) => {
  const tile = document.createElement("canvas"); // laid from the canvas's corner, so that it goes on from cell to cell
  tile.width = tile.height = 6;
  const stroke = tile.getContext("2d");
  stroke.strokeStyle = ramps().none;
  stroke.lineWidth = 1.5;
  for (const offset of [-6, 0, 6]) {
    stroke.moveTo(offset, 6);
    stroke.lineTo(offset + 6, 0);
  }
  stroke.stroke();
  return pen.createPattern(tile, "repeat");
};

const drawHeat = () => {
  const room = (printing.matches ? PAPER : $("scroll").clientWidth) - LABELS - GUTTER - 2;
  const [columns, rows] = [ladder.rows.length, ladder.steps.length];
  geometry.width = Math.min(Math.max(room / Math.max(columns, 1), printing.matches ? 0 : 2), 26);
  geometry.height = rows > 40 ? 8 : rows > 14 ? 14 : 26;
  const pen = canvasOf(heat, GUTTER + columns * geometry.width + 2, HEAD + rows * geometry.height + BAND);
  const { width, height } = geometry;
  const gap = width >= 6 ? 1 : 0;
  const hatching = hatch(pen);
  for (let x = 0; x < columns; x += 1)
    for (const [y, cell] of at[x]) {
      // without a gap cells meet at whole pixels, so that no seam shows between fractions of them
      const [left, right] = [x * width, (x + 1) * width - gap].map((value) => GUTTER + (gap ? value : Math.round(value)));
      const top = HEAD + y * height;
      pen.fillStyle = colorOf(cell);
      pen.fillRect(left, top, Math.max(right - left, 0.5), height - 1);
      if (ladder.values || states[cell[1]] !== "missing") continue;
      pen.fillStyle = hatching;
      pen.fillRect(left, top, Math.max(right - left, 0.5), height - 1);
    }
  if (ladder.resumed !== null) {
    pen.fillStyle = ink("--accent");
    pen.fillRect(0, HEAD + ladder.resumed * height - 1.5, GUTTER + columns * width + 2, 2);
  }
  drawLabels(pen);
  for (const [x, y] of origins) {
    outline(pen, x, y, ramps().none, 2.6, 0.8); // a halo: the mark's colour may be the cell's own
    outline(pen, x, y, ramps().mark, 1.4);
  }
  base.width = heat.width;
  base.height = heat.height;
  base.getContext("2d").drawImage(heat, 0, 0);
  drawMarks(pen);
  Object.assign(heat.dataset, { width, height, left: GUTTER, top: HEAD });
};

const base = document.createElement("canvas"); // the map without what moves in it
const drawMarks = (pen) => {
  if (cursor) {
    outline(pen, ...cursor, ramps().none, 2.6, 1.6);
    outline(pen, ...cursor, ink("--accent"), 2.6);
  }
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
    const named = typeof step === "number" && (y === 0 || typeof ladder.steps[y - 1] !== "number");
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

const outline = (pen, x, y, color, weight, out = 0) => {
  const { width, height } = geometry;
  pen.strokeStyle = color;
  pen.lineWidth = weight;
  pen.strokeRect(GUTTER + x * width - 0.5 - out, HEAD + y * height - 0.5 - out, Math.max(width, 2) + 2 * out, height + 2 * out);
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
    : [key([0, 0], "equal in every bit"), key([0, 3, 1e3], "origin", true), key([0, 5, 0], "not compared"), ...(ladder.resumed === null ? [] : [resumedKey()]), ...(hasDeclared ? [key([0, 4, 2], "declared")] : [])]));
};
const hasDeclared = ladder.rows.some((row) => row.cells.some((cell) => states[cell[1]] === "declared"));
const resumedKey = () => {
  const box = document.createElement("canvas");
  const pen = canvasOf(box, 16, 14);
  pen.fillStyle = ink("--accent");
  pen.fillRect(0, 6, 16, 2);
  const shown = element("span");
  shown.append(box, "resumed here");
  return shown;
};
const key = (cell, text, outlined) => {
  const box = document.createElement("canvas");
  const pen = canvasOf(box, 16, 14);
  pen.fillStyle = colorOf(cell);
  pen.fillRect(1, 1, 14, 12);
  if (!ladder.values && states[cell[1]] === "missing") {
    pen.fillStyle = hatch(pen);
    pen.fillRect(1, 1, 14, 12);
  }
  if (outlined) {
    pen.strokeStyle = ramps().mark;
    pen.lineWidth = 1.6;
    pen.strokeRect(1, 1, 14, 12);
  }
  const shown = document.createElement("span");
  shown.append(box, text);
  return shown;
};
