// --- charts: the numbers at a place ----------------------------------------------------------------------
for (const drawing of document.querySelectorAll("svg[data-chart]")) {
  const { labels, places } = charts[drawing.dataset.chart];
  const guide = drawing.querySelector(".guide");
  let current = -1;
  const show = (number, y) => {
    current = number;
    const { at: place, name, values } = places[number];
    guide.setAttribute("x1", place);
    guide.setAttribute("x2", place);
    guide.removeAttribute("hidden");
    const box = drawing.getBoundingClientRect();
    const x = box.left + (place * box.width) / drawing.viewBox.baseVal.width;
    showTip([[name, "mono"], ...values.map((value, n) => [`${labels[n]} ${value}`])], x, y);
  };
  const hide = () => {
    current = -1;
    guide.setAttribute("hidden", "");
    hideTip();
  };
  const open = () => {
    const { cell } = places[current] || {};
    if (cell) location.hash = cell;
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) * drawing.viewBox.baseVal.width) / box.width;
    const away = places.map(({ at: place }) => Math.abs(place - x));
    show(away.indexOf(Math.min(...away)), event.clientY);
  });
  drawing.addEventListener("pointerleave", hide);
  drawing.addEventListener("blur", hide);
  drawing.addEventListener("click", open);
  drawing.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) {
      const next = Math.min(Math.max(current + by, 0), places.length - 1);
      show(next, drawing.getBoundingClientRect().top + 10);
    } else if (event.key === "Enter") open();
    else return;
    event.preventDefault();
  });
}
