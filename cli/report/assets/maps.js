// --- maps of tensors -----------------------------------------------------------------------------------
const NOT_FINITE = 9999, SPAN = 80; // twentieths of a decade: four decades below the worst block
const LEFT = 6, TOP = 6;
const shade = (level, most) => {
  const found = ramps();
  if (level === null) return found.equal;
  if (level === NOT_FINITE) return found.mark;
  return between(found.spread, 1 - (most - level) / SPAN);
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
  const boxes = tensor.parts.map(({ label, rows, columns }) => {
    const [left, right] = columns.map((value) => LEFT + (wide * value) / tensor.columns);
    const [top, bottom] = rows.map((value) => TOP + (high * value) / tensor.rows);
    return { label, left, right, top, bottom, inside: columns[0] > 0 || columns[1] < tensor.columns };
  });
  for (const [color, weight] of [[ramps().none, 3], [ramps().mark, 1]]) { // a halo: blocks may be as dark
    pen.strokeStyle = color;
    pen.lineWidth = weight;
    for (const { left, right, top, bottom } of boxes) pen.strokeRect(left, top, right - left, bottom - top);
  }
  if (tensor.rows === 1) labelBelow(pen, boxes);
  else labelRows(pen, boxes, LEFT + wide + 6);
};
const labelBelow = (pen, boxes) => {
  // all as long as they fit, else all by number alone: one left out would give its place to its neighbour
  const fits = (texts) => texts.every((text, n) => pen.measureText(text).width < boxes[n].right - boxes[n].left);
  const full = boxes.map(({ label }) => label), bare = full.map((label) => label.replace(/^ranks? /, ""));
  const texts = fits(full) ? full : fits(bare) ? bare : [];
  pen.fillStyle = ink("--muted");
  texts.forEach((text, n) => pen.fillText(text, boxes[n].left + 1, boxes[n].bottom + 9));
};
const labelRows = (pen, boxes, beside) => {
  let free = 0;
  for (const { label, left, right, top, bottom, inside } of boxes) {
    const middle = (top + bottom) / 2;
    if (inside) {
      const text = pen.measureText(label).width;
      if (text + 8 > right - left || bottom - top < 18) continue;
      pen.fillStyle = ink("--bg");
      pen.fillRect(left + 3, top + 3, text + 6, 14);
      pen.fillStyle = ink("--ink");
      pen.fillText(label, left + 6, top + 10.5);
    } else if (middle - 6 >= free) {
      pen.fillStyle = ink("--muted");
      pen.fillText(label, beside, middle, 72);
      free = middle + 6;
    } else {
      pen.fillStyle = ink("--muted");
      pen.fillRect(beside - 3, middle, 4, 1); // there is one more part than there is room to name
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
  const swatch = (color, text) => {
    const mark = document.createElement("canvas");
    const pen_ = canvasOf(mark, 12, 10);
    pen_.fillStyle = color;
    pen_.fillRect(0, 0, 12, 10);
    const shown = element("span", undefined, "key");
    shown.append(mark, text);
    return shown;
  };
  const { blocks } = tensors[canvas.dataset.tensor];
  line.replaceChildren(
    `≤ ${short(most - SPAN)}`, box, short(most),
    ...(blocks.includes(null) ? [swatch(ramps().equal, "equal")] : []),
    ...(blocks.includes(NOT_FINITE) ? [swatch(ramps().mark, "not finite in one run")] : []),
  );
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
