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

// --- keys ----------------------------------------------------------------------------------------------
const help = $("help");
const ask = () => (help.open ? help.close() : help.showModal());
$("keys-shown").addEventListener("click", ask);
const escape = () => {
  hideTip();
  const card = document.activeElement.closest(".tensor");
  if (card) location.hash = tensors[card.id.replace("tensor-", "")].cell;
};
const seek = () => {
  $("ladder").scrollIntoView();
  search.focus({ preventScroll: true });
};
const KEYS = { n: () => toOrigin(1), p: () => toOrigin(-1), d: turn, "/": seek, "?": ask, Escape: escape };
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input")) return;
  if (!KEYS[event.key] || (help.open && event.key !== "?")) return;
  KEYS[event.key]();
  event.preventDefault();
});

// --- copying a command ---------------------------------------------------------------------------------
document.addEventListener("click", (event) => {
  const button = event.target.closest(".copy");
  if (!button) return;
  const line = button.parentElement.querySelector("code");
  const done = () => {
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  };
  const mark = () => getSelection().selectAllChildren(line); // a page opened from disk may have no clipboard
  if (navigator.clipboard) navigator.clipboard.writeText(line.textContent).then(done, mark);
  else mark();
});

// --- the beginning -------------------------------------------------------------------------------------
const nearest = () => {
  let best = null, most = 0;
  ladder.rows.forEach((row, x) => row.cells.forEach(([y, state, ratio]) => {
    if (states[state] === "within" && ratio > most) [best, most] = [[x, y], ratio];
  }));
  return best;
};
drawAll();
const begin = ladder.first || (ladder.values ? null : nearest());
if (begin) select(...begin);
follow();
