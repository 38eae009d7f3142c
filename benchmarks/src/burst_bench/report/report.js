"use strict";
// `figures` maps the id of an element to Plotly's data and layout. Table rows and timelines have their engine's name in
// data-engine; lines have it in meta.engine.
(async () => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const boxes = [...document.querySelectorAll("#filter input")];
  const buttons = ["toImage", "zoom2d", "pan2d", "resetScale2d"]; // no button that sends data to a server
  const config = { responsive: true, displaylogo: false, modeBarButtons: [buttons] };
  const chosen = () => boxes.filter((box) => box.checked).map((box) => box.dataset.engine);

  // "ring" also selects "ring:contiguous".
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

  // A change can arrive while an earlier one is being drawn; the latest change wins.
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
      // A hidden element has no width, so draw a plot only when it is shown.
      if (!plot.hidden) await Plotly.react(plot, data, layout, config);
      if (!plot.hidden) Plotly.Plots.resize(plot);
    }
    // Tests read this attribute to learn that drawing is complete, and for which engines.
    if (own === latest) document.body.dataset.engines = JSON.stringify([...engines]);
  };

  boxes.forEach((box) => box.addEventListener("change", () => { writeFragment(); apply(); }));
  window.addEventListener("hashchange", () => { readFragment(); apply(); });
  readFragment();
  await apply();
})();
