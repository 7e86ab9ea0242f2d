"use strict";
/* Requests and what their time went on: a list of bars, and one request in full. */

const PARTS = ["tokenize", "route", "queue", "prefill", "interference", "preempted", "swapped", "decode", "transport",
  "deliver", "failover", "other"];

function partColor(name) { return `var(--${name === "swapped" ? "swapped-part" : name})`; }

function lifeLegend() {
  const keys = PARTS.map((name) => {
    const key = element("i", { class: "key" });
    key.style.background = partColor(name);
    return element("span", {}, key, format.words(name));
  });
  document.getElementById("life-legend").replaceChildren(...keys);
}

/* A bar whose lengths are in proportion to `longest`, or to the request itself without one. */
function lifeBar(request, longest = request.end_to_end_ms) {
  const total = Math.max(longest, 1e-6);
  const bar = element("span", { class: "life", role: "img", "aria-label": lifeText(request) });
  for (const name of PARTS) {
    const ms = partMs(request, name);
    if (ms <= 0) continue;
    const piece = element("i", { title: `${format.words(name)} ${format.ms(ms)}` });
    piece.style.width = `${(100 * ms) / total}%`;
    piece.style.background = partColor(name);
    bar.append(piece);
  }
  return bar;
}

function partMs(request, name) {
  return request.parts.filter((part) => part.name === name).reduce((sum, part) => sum + part.ms, 0);
}

function lifeText(request) {
  const named = PARTS.map((name) => [name, partMs(request, name)]).filter(([, ms]) => ms > 0);
  return named.map(([name, ms]) => `${format.words(name)} ${format.ms(ms)}`).join(", ");
}

class RequestList {
  constructor(onOpen) {
    this.list = document.getElementById("requests");
    this.onOpen = onOpen;
    lifeLegend();
  }

  draw(requests) {
    const focused = document.activeElement?.dataset?.id;
    const longest = Math.max(...requests.map((request) => request.end_to_end_ms), 1);
    this.list.replaceChildren(...requests.map((request) => {
      const open = element("button", { type: "button", "data-id": request.id, onclick: () => this.onOpen(request.id) },
        element("span", { class: "id" }, request.id), element("span", {}, format.words(request.status)),
        element("span", { class: "number" }, format.ms(request.end_to_end_ms)), lifeBar(request, longest));
      return element("li", {}, open);
    }));
    document.getElementById("no-requests").hidden = requests.length > 0;
    if (focused) this.list.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  }
}

class RequestDetail {
  constructor(showStep) {
    this.dialog = document.getElementById("detail");
    this.body = document.getElementById("detail-body");
    this.showStep = showStep;
  }

  open(id) {
    document.getElementById("detail-title").textContent = id;
    this.body.replaceChildren(element("p", {}, "asking the server"));
    this.dialog.showModal();
  }

  fail(message) { this.body.replaceChildren(element("p", { class: "problem", role: "alert" }, message)); }

  draw(explanation) {
    const { status, end_to_end_ms: total } = explanation;
    this.body.replaceChildren(
      element("p", {}, `${format.words(status)}, ${format.ms(total)} from end to end`),
      lifeBar(explanation), this.parts(explanation),
      ...this.rows("Prompt chunks", explanation.chunks, true),
      ...this.rows("Preemptions", explanation.preemptions, false),
      ...this.facts("Cache", explanation.cache),
      ...this.rows("Workers", explanation.workers, false),
    );
  }

  parts({ parts }) {
    const rows = parts.filter((part) => part.ms > 0).map((part) => element("tr", {},
      element("td", {}, format.words(part.name)), element("td", { class: "number" }, format.ms(part.ms)),
      element("td", {}, part.cause ?? ""), element("td", {}, this.blockers(part.blockers ?? []))));
    return table(["part", "time", "why", "in its way"], rows);
  }

  blockers(blockers) {
    const names = blockers.map((blocker) => {
      if (typeof blocker === "string") return blocker;
      return blocker.ms === undefined ? blocker.id : `${blocker.id} (${format.ms(blocker.ms)})`;
    });
    return names.join(", ");
  }

  rows(title, entries, haveSteps) {
    if (!entries?.length) return [];
    const simple = (value) => value === null || typeof value !== "object";
    const names = [...new Set(entries.flatMap(Object.keys))].filter((name) => entries.every((entry) => simple(entry[name])));
    const made = entries.map((entry) => element("tr", {}, ...names.map((name) => {
      const text = typeof entry[name] === "number" ? format.number(entry[name]) : String(entry[name] ?? "");
      if (!haveSteps || name !== "step_id") return element("td", {}, text);
      const show = element("button", { type: "button", onclick: () => this.jump(entry[name]) }, `step ${text}`);
      return element("td", {}, show);
    })));
    return [element("h3", {}, title), table(names, made)];
  }

  facts(title, facts) {
    const entries = Object.entries(facts ?? {}).filter(([, value]) => value === null || typeof value !== "object");
    if (!entries.length) return [];
    const text = entries.map(([name, value]) => `${format.words(name)}: ${value}`).join(" · ");
    return [element("h3", {}, title), element("p", {}, text)];
  }

  jump(stepId) {
    this.dialog.close();
    if (this.showStep(stepId)) document.getElementById("budget-chart").focus();
  }
}

function table(names, rows) {
  const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, format.words(name))));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}
