// What the tests of how a page looks ask of it.  Each function returns a list of complaints.
const seen = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });

const named = (element) => {
  const style = element.getAttribute("class");
  return `<${element.tagName.toLowerCase()}${element.id && ` id=${element.id}`}${style ? ` class=${style}` : ""}>`;
};

// Any CSS colour as red, green, blue of 0 to 255 and an alpha of 0 to 1.
const brush = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const rgba = (colour) => {
  brush.clearRect(0, 0, 1, 1);
  brush.fillStyle = colour;
  brush.fillRect(0, 0, 1, 1);
  const [red, green, blue, alpha] = brush.getImageData(0, 0, 1, 1).data;
  return [red, green, blue, alpha / 255];
};

const over = (top, under) => {
  const alpha = top[3] + under[3] * (1 - top[3]);
  const mix = (i) => (alpha ? (top[i] * top[3] + under[i] * under[3] * (1 - top[3])) / alpha : 0);
  return [mix(0), mix(1), mix(2), alpha];
};

// WCAG 2.2, "relative luminance" and "contrast ratio".
const luminance = (colour) => {
  const [r, g, b] = colour.slice(0, 3).map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ratio = (one, other) => {
  const [light, dark] = [luminance(one), luminance(other)].sort((a, b) => b - a);
  return (light + 0.05) / (dark + 0.05);
};

const paint = (element) => {
  const style = getComputedStyle(element);
  const drawn = element instanceof SVGElement && element.tagName !== "svg";
  if (drawn && element instanceof SVGTextContentElement) return [0, 0, 0, 0];
  const colour = rgba(drawn ? (style.fill === "none" ? "transparent" : style.fill) : style.backgroundColor);
  colour[3] *= drawn ? Number(style.fillOpacity) : 1;
  return colour;
};

// What lies under a point, from the element with the text down.
const ground = (element, x, y) => {
  const stack = document.elementsFromPoint(x, y);
  const from = stack.indexOf(element);
  const layers = from < 0 ? [] : stack.slice(from);
  for (let each = element; each && from < 0; each = each.parentElement) layers.push(each);
  let colour = [0, 0, 0, 0];
  for (const each of layers) colour = over(colour, paint(each));
  const canvas = matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
  return over(colour, canvas);
};

// Texts whose contrast is below what WCAG's level AA asks for.
const contrast = () => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.data.trim();
    if (!text || !seen(element) || element.closest("option, [disabled], [aria-disabled=true], title, desc")) continue;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    const box = range.getBoundingClientRect();
    // What only a screen reader gets is a pixel wide, or far away.
    if (box.width < 2 || box.height < 2 || box.right < 0 || box.bottom < 0) continue;
    const style = getComputedStyle(element);
    const colour = rgba(element instanceof SVGElement ? style.fill : style.color);
    for (let each = element; each; each = each.parentElement) colour[3] *= Number(getComputedStyle(each).opacity);
    const under = ground(element, box.left + Math.min(box.width / 2, 8), box.top + box.height / 2);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const reached = ratio(over(colour, under), under);
    if (reached < (large ? 3 : 4.5)) found.push(`${reached.toFixed(2)}: ${named(element)} ${text.slice(0, 40)}`);
  }
  return [...new Set(found)];
};

// What is wider than the page, so that the page itself scrolls sideways.
const tooWide = () => {
  const width = document.documentElement.clientWidth;
  if (width > 600) return [`a phone makes it ${width} pixels wide: it has no meta viewport`];
  // A phone zooms out of a page that is too wide.
  if (Math.max(document.scrollingElement.scrollWidth, window.innerWidth) <= width) return [];
  return [...document.body.querySelectorAll("*")]
    .filter((each) => each.getBoundingClientRect().right > width + 1)
    .map((each) => `${Math.round(each.getBoundingClientRect().right)} of ${width}: ${named(each)}`)
    .slice(0, 10);
};

const CONTROLS = "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']";
const controls = () =>
  [...document.querySelectorAll(CONTROLS)].filter((each) => seen(each) && !each.matches("[disabled], [tabindex='-1']"));

// A screen reader's needs: one h1, landmarks, captions, names, headings without a gap.
const markup = () => {
  const found = [];
  const wants = (holds, complaint) => holds || found.push(complaint);
  wants(document.documentElement.lang, "the document has no language");
  wants(document.title, "the document has no title");
  wants(document.querySelectorAll("h1").length === 1, "there is not exactly one h1");
  wants(document.querySelectorAll("main").length === 1, "there is not exactly one main");
  for (const table of document.querySelectorAll("table")) {
    wants(table.caption || table.ariaLabel || table.getAttribute("aria-labelledby"), `${named(table)} has no caption`);
  }
  for (const head of document.querySelectorAll("th")) wants(head.scope, `th ${head.textContent.trim()} has no scope`);
  for (const image of document.querySelectorAll("img")) wants(image.hasAttribute("alt"), `${named(image)} has no alt`);
  for (const drawing of document.querySelectorAll("svg")) {
    const name = drawing.getAttribute("aria-label") || drawing.getAttribute("aria-labelledby") || drawing.querySelector("title");
    wants(drawing.closest("[aria-hidden=true]") || name, `${named(drawing)} has no name`);
  }
  for (const labelled of document.querySelectorAll("[aria-labelledby], [aria-describedby], label[for]")) {
    for (const attribute of ["aria-labelledby", "aria-describedby", "for"]) {
      for (const id of (labelled.getAttribute(attribute) || "").split(/\s+/).filter(Boolean)) {
        wants(document.getElementById(id), `${attribute}=${id} of ${named(labelled)} leads nowhere`);
      }
    }
  }
  const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
  for (const id of new Set(ids.filter((each, place) => ids.indexOf(each) !== place))) found.push(`id ${id} is there twice`);
  let level = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    if (!seen(heading)) continue;
    const next = Number(heading.tagName[1]);
    wants(next <= level + 1, `${named(heading)} ${heading.textContent.trim().slice(0, 30)} comes after an h${level}`);
    level = next;
  }
  return found;
};
