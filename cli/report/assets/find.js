// --- finding a boundary --------------------------------------------------------------------------------
const MOST_FOUND = 40;
const worstStep = (x) => {
  let best = ladder.rows[x].cells.length ? ladder.rows[x].cells[0][0] : 0, most = -1;
  for (const [y, state, ratio] of ladder.rows[x].cells) {
    const weight = ladder.values ? (state === 1 ? 1e30 : Math.abs(Math.log2(ratio || 1))) : states[state] === "missing" ? 0 : unbounded(ratio) ? (states[state] === "equal" ? 0 : 1e30) : ratio;
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
  if (!fitting.length) found.append(element("p", ladder.rows_left_out ? "none of the boundaries on this page has such a name" : "no boundary has such a name", "muted"));
  if (fitting.length > MOST_FOUND) found.append(element("p", "… more: type further words", "muted"));
};
const step = (by) => {
  const links = [...found.querySelectorAll("a")], next = links.indexOf(document.activeElement) + by;
  (links[Math.min(next, links.length - 1)] || search).focus();
};
search.addEventListener("input", find);
search.addEventListener("focus", find);
$("find").addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown") step(1);
  else if (event.key === "ArrowUp") step(-1);
  else if (event.key === "Enter" && event.target === search) found.querySelector("a")?.click();
  else if (event.key === "Escape") {
    search.value = "";
    find();
    heat.focus({ preventScroll: true });
  } else return;
  event.preventDefault();
  event.stopPropagation();
});
found.addEventListener("click", () => { found.hidden = true; });
document.addEventListener("click", (event) => { if (!event.target.closest(".find")) found.hidden = true; });
