// Cards of GPUs and vGPUs. Each card is created once and updated in place, so that keyboard focus and screen readers
// keep their position.

const SVG = "http://www.w3.org/2000/svg";

/** Time span of a chart, in milliseconds. */
const SPAN = 120_000;

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** Sets the text of a node, if it differs. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const percent = (value) => `${value.toFixed(1)} %`;

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${count >= 10 || count % 1 === 0 ? count.toFixed(0) : count.toFixed(1)} ${units[unit]}`;
}

const seconds = (ns) => `${(ns / 1e9).toFixed(1)} s`;

/** Shares with a line and a label, in percent, and times with a label, in minutes before now. */
const SHARES = [100, 50, 0], MINUTES = [2, 1, 0];

const x = (ago) => SPAN - ago;
const y = (share) => (99 - 98 * Math.min(share, 100) / 100).toFixed(2);

/**
 * Chart of shares over time, with axes: an area for the measured share, and optionally a line for the requested share.
 */
class Chart {
  constructor(label) {
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("class", "chart");
    this.svg.setAttribute("viewBox", `0 0 ${SPAN} 100`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.label = label;
    for (const share of SHARES) this.rule(0, y(share), SPAN, y(share));
    for (const minute of MINUTES) this.rule(x(minute * 60_000), 0, x(minute * 60_000), 100);
    // The drawing is stretched to the card's width; texts in it would be too.
    const labels = (name, texts) => element("div", { className: name, ariaHidden: "true" },
      ...texts.map((text) => element("span", {}, text)));
    this.node = element("div", { className: "plot" },
      labels("shares", SHARES.map((share) => `${share} %`)), this.svg,
      labels("times", MINUTES.map((minute) => minute ? `${minute} min ago` : "now")));
    [this.got, this.asked] = ["got", "asked"].map((name) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      this.svg.append(path);
      return path;
    });
  }

  /** Adds a line of the grid. */
  rule(x1, y1, x2, y2) {
    const line = document.createElementNS(SVG, "line");
    for (const [name, value] of Object.entries({ x1, y1, x2, y2 })) line.setAttribute(name, value);
    this.svg.append(line);
  }

  /** Draws points [milliseconds, measured share, requested share or undefined], oldest first. */
  draw(points, now) {
    const from = now - SPAN;
    const shown = points.filter(([at]) => at >= from);
    const when = (point) => Math.round(x(now - point[0]));
    const line = (of) => shown.map((point, index) => `${index ? "L" : "M"}${when(point)} ${y(of(point))}`).join("");
    const last = shown.at(-1);
    this.got.setAttribute("d", last ? `${line((p) => p[1])}L${when(last)} 99L${when(shown[0])} 99Z` : "");
    this.asked.setAttribute("d", last?.[2] === undefined ? "" : line((p) => p[2]));
    const text = last === undefined ? "no measurement yet"
      : `now ${percent(last[1])}${last[2] === undefined ? "" : ` of ${percent(last[2])} asked`}`;
    this.svg.setAttribute("aria-label", `${this.label}: ${text}`);
  }
}

function rows(list, pairs) {
  while (list.children.length > pairs.length * 2) list.lastChild.remove();
  pairs.forEach(([name, value], index) => {
    if (!list.children[index * 2]) list.append(element("dt"), element("dd"));
    setText(list.children[index * 2], name);
    setText(list.children[index * 2 + 1], value);
  });
}

/** Card of a physical GPU. */
export class ParentCard {
  constructor(name) {
    this.state = element("span", { className: "state" });
    this.title = element("h3", {}, name, this.state);
    this.about = element("p", { className: "uuid" });
    this.chart = new Chart(`${name}: busy`);
    this.busy = element("b");
    const legend = element("p", { className: "legend" },
      element("span", { className: "key" }, "busy "), this.busy);
    this.meter = element("meter", { min: 0, max: 1, value: 0 });
    this.list = element("dl");
    this.node = element("article", { className: "card" },
      this.title, this.about, this.chart.node, legend, this.meter, this.list);
  }

  show(parent, stats, points, now) {
    this.state.className = `state ${parent.state}`;
    setText(this.state, parent.state);
    setText(this.about, parent.description);
    this.chart.draw(points, now);
    setText(this.busy, percent(stats?.busy ?? 0));
    const used = parent.vram_bytes - parent.vram_free_bytes;
    const memory = `${bytes(used)} of ${bytes(parent.vram_bytes)}`;
    this.meter.value = parent.vram_bytes ? used / parent.vram_bytes : 0;
    this.meter.setAttribute("aria-label", `Video memory allocated to vGPUs: ${memory}`);
    rows(this.list, [
      ["Video memory allocated", memory],
      ["Policy", parent.scheduler],
      ["vGPUs running", String(parent.running)],
    ]);
  }
}

/** Card of a vGPU. A click on its thumbnail calls `open` with the UUID. */
export class VgpuCard {
  constructor(uuid, open) {
    this.state = element("span", { className: "state" });
    this.name = element("span");
    this.image = element("img", { alt: "", hidden: true });
    this.note = element("span");
    this.thumb = element("button", { className: "thumb", type: "button", disabled: true }, this.image, this.note);
    this.thumb.addEventListener("click", () => open(uuid));
    this.chart = new Chart("Share of the GPU");
    this.got = element("b");
    this.asked = element("b");
    this.askedName = element("span", { className: "key asked" });
    const legend = element("p", { className: "legend" },
      element("span", {}, element("span", { className: "key" }, "got "), this.got),
      element("span", {}, this.askedName, " ", this.asked));
    this.list = element("dl");
    this.warning = element("p", { className: "warning", hidden: true });
    this.node = element("article", { className: "card" },
      element("h3", {}, this.name, this.state), element("p", { className: "uuid" }, uuid),
      this.thumb, this.chart.node, legend, this.list, this.warning);
    this.node.dataset.uuid = uuid;
  }

  /** Shows a thumbnail, or the reason why there is none. */
  showThumbnail(url, reason) {
    if (this.url) URL.revokeObjectURL(this.url);
    this.url = url;
    this.image.hidden = !url;
    if (url) this.image.src = url;
    setText(this.note, url ? "" : reason);
  }

  show(vgpu, stats, points, now) {
    const running = vgpu.state === "running";
    const head = running && stats?.limits.refresh_per_second != null;
    setText(this.name, vgpu.name ? `${vgpu.name}, ${vgpu.mdev_type}` : vgpu.mdev_type);
    const called = vgpu.name ?? vgpu.uuid;
    this.called = vgpu.name ?? vgpu.uuid.slice(0, 8);
    this.node.setAttribute("aria-label", `vGPU ${called}, ${vgpu.mdev_type}, ${vgpu.state}`);
    this.state.className = `state ${vgpu.state}`;
    const programs = stats?.programs;
    const user = programs && !programs.in_vm ? `${programs.processes.length} program${programs.processes.length === 1 ? "" : "s"}`
      : vgpu.vm ? `VM ${vgpu.vm_name ?? vgpu.vm.pid}` : null;
    setText(this.state, user ? `${vgpu.state}, ${user}` : vgpu.state);
    this.head = head;
    this.thumb.disabled = !head;
    this.thumb.setAttribute("aria-label", head ? `Open the screen of vGPU ${called}` : "No screen");
    if (!head) this.showThumbnail(null, running ? "No display" : "Not running");
    this.chart.node.hidden = !running;
    this.chart.draw(points, now);
    setText(this.got, stats ? percent(stats.share_measured) : "–");
    setText(this.askedName, stats?.share_asked == null ? "entitled" : "asked");
    setText(this.asked, stats ? percent(stats.share_asked ?? stats.share_entitled) : "–");
    const pairs = [["GPU", vgpu.parent]];
    if (stats) {
      pairs.push(
        ["Video memory", programs ? `${bytes(programs.vram_used_bytes)} of ${bytes(stats.vram_bytes)}`
          : bytes(stats.vram_bytes)],
        ["Guest memory mapped", `${bytes(stats.imported_bytes)} of ${bytes(stats.limits.imported_bytes)}`],
        ["Channels", `${stats.channels} of ${stats.limits.channels}`],
        ["Engine time", seconds(stats.engine_ns)],
        ["Waiting time", seconds(stats.wait_ns)],
        ["Waits, median", stats.wait_p50_us == null ? "none" : seconds(stats.wait_p50_us * 1000)],
        ["Waits, 99 % within", stats.wait_p99_us == null ? "none" : seconds(stats.wait_p99_us * 1000)],
        ["Submissions", stats.submissions.toLocaleString("en")],
        ["Faults, hangs", `${stats.faults}, ${stats.hang_resets}`]);
      for (const { pid, name, vram_used_bytes: used } of programs?.processes ?? []) {
        pairs.push([`Process ${pid}`, `${name} ${bytes(used)}`.trim()]);
      }
    }
    rows(this.list, pairs);
    const warning = [vgpu.reason, ...vgpu.warnings].filter(Boolean).join("; ");
    this.warning.hidden = !warning;
    setText(this.warning, warning);
  }
}
