"use strict";
// The figures are Plotly's data and layout by the id of their element. An engine's name stands in its table rows and
// timelines as data-engine and in its lines as meta.engine.
(async () => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const boxes = [...document.querySelectorAll("#filter input")];
  const buttons = ["toImage", "zoom2d", "pan2d", "resetScale2d"]; // none that sends anything anywhere
  const config = { responsive: true, displaylogo: false, modeBarButtons: [buttons] };
  const chosen = () => boxes.filter((box) => box.checked).map((box) => box.dataset.engine);

  // "ring" stands for "ring:contiguous" too.
  const readFragment = () => {
    const names = new URLSearchParams(location.hash.slice(1)).get("engines")?.split(",");
    for (const box of boxes) {
      const engine = box.dataset.engine;
      box.checked = !names || names.some((name) => name && (name === engine || engine.startsWith(`${name}:`)));
    }
  };

  const writeFragment = () => {
    const names = chosen().map(encodeURIComponent).join(",");
    const all = boxes.every((box) => box.checked);
    history.replaceState(null, "", all ? location.pathname + location.search : `#engines=${names}`);
  };

  // One change may come while another is being drawn: the last one to be asked for is the one that stays.
  let latest = 0;
  const apply = async () => {
    const own = ++latest;
    const engines = new Set(chosen());
    document.querySelectorAll("tr[data-engine], .timeline[data-engine]").forEach((element) => {
      element.hidden = !engines.has(element.dataset.engine);
    });
    for (const plot of document.querySelectorAll(".plot")) {
      if (own !== latest) return;
      if (plot.closest("[hidden]:not(.plot)")) continue;
      const { data, layout } = figures[plot.id];
      const lines = data.filter((trace) => trace.meta);
      lines.forEach((line) => { line.visible = engines.has(line.meta.engine); });
      plot.hidden = lines.length > 0 && !lines.some((line) => line.visible);
      if (lines.length > 0) plot.nextElementSibling.hidden = !plot.hidden;
      // An element that was hidden has no width to draw to, so a plot is drawn when it is first shown.
      if (!plot.hidden) await Plotly.react(plot, data, layout, config);
      if (!plot.hidden) Plotly.Plots.resize(plot);
    }
    // Says that all is drawn, and for which engines.
    if (own === latest) document.body.dataset.engines = JSON.stringify([...engines]);
  };

  boxes.forEach((box) => box.addEventListener("change", () => { writeFragment(); apply(); }));
  window.addEventListener("hashchange", () => { readFragment(); apply(); });
  readFragment();
  await apply();
})();
