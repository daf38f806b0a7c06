// Elements of the page. All text goes in as text: nothing that a file says is ever read as markup.

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

// Columns whose header begins with "#" hold numbers and stand to the right.
function table(headers, rows, caption = null) {
  const isNumeric = headers.map((header) => header.startsWith("#"));
  const cell = (tag, text, at, more = {}) => el(tag, { class: isNumeric[at] ? "number" : null, ...more }, text);
  const head = headers.map((header, at) => cell("th", header.replace(/^#/, ""), at, { scope: "col" }));
  const body = rows.map((row) => el("tr", {}, row.map((text, at) => cell("td", text, at))));
  const made = el("table", {}, caption ? el("caption", { class: "soft small" }, caption) : null,
    el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption || "table" }, made);
}

// Its content is made when it is first opened.
function unfolding(title, make) {
  const made = el("details", {}, el("summary", {}, title));
  made.addEventListener("toggle", () => {
    if (made.open) made.replaceChildren(made.firstChild, make());
  });
  return made;
}

function button(text, act, more = {}) {
  return el("button", { type: "button", onclick: act, ...more }, text);
}

function swatch(colour) {
  const made = el("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = colour;
  return made;
}
