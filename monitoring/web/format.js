"use strict";
/* Numbers and elements for the page. Everything that comes from the server becomes text, never markup. */

const format = {
  number(value) { return value.toLocaleString("en-US", { maximumFractionDigits: value < 10 ? 1 : 0 }); },
  ms(value) {
    if (value >= 60000) return `${(value / 60000).toFixed(1)} min`;
    if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
    return value >= 100 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`;
  },
  percent(share) { return `${(100 * share).toFixed(0)}%`; },
  id(id) { return id.length > 16 ? `${id.slice(0, 13)}…` : id; },
  words(name) { return name.replaceAll("_", " "); },
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }
