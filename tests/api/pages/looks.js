// What a page looks like, measured in it: {overflowing, unreachable, faint}. Contrast as in WCAG 2.1, 1.4.3.
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (css) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => {
    const part = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = (element) => { // the first that is opaque: nothing here lies half transparent over it
    for (let at = element; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const contrast = (element) => {
    const [light, dark] = [luminance(rgba(getComputedStyle(element).color)), luminance(ground(element))].sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05);
  };
  const shown = [...document.querySelectorAll("body *:not(svg *, script, noscript)")].filter((e) => e.checkVisibility());
  const name = (e) => `${e.tagName}.${e.className} ${e.textContent.trim().slice(0, 40)}`;
  const withText = shown.filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()));
  return {
    overflowing: [
      ...(document.documentElement.scrollWidth > innerWidth ? [`the page: ${document.documentElement.scrollWidth}`] : []),
      ...shown.filter((e) => !e.closest(".skip, .scroll, .uplot, pre") && e.getBoundingClientRect().right > innerWidth + 0.5).map(name),
      ...shown.filter((e) => e.matches(".card table:not(.scroll *)") && e.getBoundingClientRect().right > e.closest(".card").getBoundingClientRect().right).map((e) => `its card: ${name(e)}`),
    ],
    // what scrolls sideways, and no key reaches it
    unreachable: shown.filter((e) => e.scrollWidth > e.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(e).overflowX) && e.tabIndex < 0).map(name),
    faint: withText.filter((e) => contrast(e) < 4.5).map((e) => `${contrast(e).toFixed(2)} ${name(e)}`),
    texts: withText.length,
  };
}
