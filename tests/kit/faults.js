// Faults of a page: each function lists the elements that have it. Used by tests/kit/chromium.py.

const luminance = (colour) => {
  const [r, g, b] = colour.match(/[\d.]+/g).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};

const background = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (!/, 0\)$/.test(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
};

const faults = {
  // Below 4.5, the minimum of WCAG 2.2 level AA.
  contrast() {
    const found = [];
    for (const e of document.querySelectorAll("h1, h2, p, b, a, th, td, dt, code, summary, figcaption, .chart text")) {
      if (!e.textContent.trim() || !e.checkVisibility()) continue;
      const style = getComputedStyle(e), svg = e.namespaceURI.endsWith("svg");
      const [x, y] = [luminance(svg ? style.fill : style.color), luminance(background(e))];
      const ratio = (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
      if (ratio < 4.5) found.push(`${e.tagName} ${e.textContent.trim().slice(0, 30)} ${ratio.toFixed(2)}`);
    }
    return found;
  },
  widerThanTheWindow() {
    return [...document.querySelectorAll("body *")]
      .filter((e) => e.checkVisibility() && !e.closest(".scroll") && !e.closest("svg"))
      .filter((e) => { const b = e.getBoundingClientRect(); return b.left < -1 || b.right > innerWidth + 1; })
      .map((e) => `${e.tagName}.${e.className}`);
  },
  outsideOfItsDrawing() {
    return [...document.querySelectorAll("figure > svg")].flatMap((svg) => {
      const whole = svg.getBoundingClientRect();
      return [...svg.querySelectorAll("text")].filter((e) => {
        const b = e.getBoundingClientRect();
        const beside = b.left < whole.left - 4 || b.right > whole.right + 4;
        return beside || b.top < whole.top - 4 || b.bottom > whole.bottom + 4;
      }).map((e) => e.textContent);
    });
  },
  smallTextOnAPhone() {
    return innerWidth !== 390 ? [] : [...document.querySelectorAll(".chart text")]
      .map((e) => [e.textContent, e.getBoundingClientRect().height]).filter(([, high]) => high < 9);
  },
  scrollsWithoutFocus() {
    return [...document.querySelectorAll("main *")].filter((e) => /auto|scroll/.test(
      getComputedStyle(e).overflowX + getComputedStyle(e).overflowY) && e.tabIndex < 0 && e.tagName !== "svg")
      .map((e) => e.className);
  },
};
