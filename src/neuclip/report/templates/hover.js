
// Shows the value under the pointer beside the figure's title. Without script the browser's own tooltip does it.
document.querySelectorAll("figure.curve").forEach((figure) => {
  const readout = figure.querySelector(".readout");
  if (!readout) return;
  const atRest = readout.textContent;
  figure.addEventListener("pointerover", (event) => {
    const under = event.target.closest(".band, .dot");
    readout.textContent = under ? under.querySelector("title").textContent : atRest;
  });
  figure.addEventListener("pointerleave", () => { readout.textContent = atRest; });
});
