// Light and dark: as the system says, until the button is used. And which colour stands for what.

const NAME_COLOURS = {
  compute: "#3b76b8", forward: "#4aa3c7", backward: "#7a6fc0", graph: "#2f9e8f", sample: "#8fb35a", load: "#c2a83e",
  pack: "#a98a6b", quantise: "#c77fb0", dequantise: "#e0a9cd", sum: "#6b8e7f", wait: "#e07b39", communicate: "#d9b48f",
  task: "#5b9a8b", evaluate: "#98a2ad", checkpoint: "#6c747e",
  hidden: "#3b76b8", gradients: "#7a6fc0", features: "#2f9e8f", ids: "#c2a83e", weights: "#c77fb0", statistics: "#6b8e7f",
  widths: "#a98a6b", scores: "#98a2ad", sizes: "#6c747e", tasks: "#4aa3c7", results: "#5b9a8b", rows: "#8fb35a", sums: "#e07b39",
};
const PALETTE = ["#3b76b8", "#e07b39", "#2f9e8f", "#b0508e", "#c2a83e", "#5b5fc7", "#c0453e", "#6c747e", "#4aa3c7", "#8fb35a"];

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function nameColour(name) {
  if (name === "rest") return variable("rest");
  if (Object.hasOwn(NAME_COLOURS, name)) return NAME_COLOURS[name];
  let sum = 7;
  for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) >>> 0;
  return PALETTE[sum % PALETTE.length];
}

function paletteColour(at) {
  return PALETTE[at % PALETTE.length];
}

const darkWanted = window.matchMedia("(prefers-color-scheme: dark)");
let themeChosen = null;

function applyTheme(theme = themeChosen || (darkWanted.matches ? "dark" : "light")) {
  document.documentElement.dataset.theme = theme;
}

function themeButton() {
  return button("Light or dark", () => {
    themeChosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    applyTheme();
    refreshAll();
  }, { id: "theme" });
}

function watchTheme() {
  darkWanted.addEventListener("change", () => {
    applyTheme();
    refreshAll();
  });
  window.addEventListener("beforeprint", () => {
    applyTheme("light");
    drawEveryPlot();
    refreshAll();
  });
  window.addEventListener("afterprint", () => {
    applyTheme();
    refreshAll();
  });
}
