// Prompt tokens over time: a stack of bars for each few seconds, and what a bar says when it is pointed at.

import { compact, count, seconds } from "./format.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
export const SOURCES = ["device", "host", "disk", "computed"];

/** The next round number that is not below. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
}

export class Chart {
  constructor(svg, most, unit, read) {
    Object.assign(this, { svg, most, unit, read, series: null, chosen: null, bars: [] });
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      this.choose(Math.floor(((event.clientX - box.left) / box.width) * this.points));
    });
    svg.addEventListener("pointerleave", () => this.choose(null));
    svg.addEventListener("blur", () => this.choose(null));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.choose((this.chosen ?? (step < 0 ? this.points : -1)) + step);
    });
  }

  get points() {
    return this.series ? this.series.device.length : 0;
  }

  /** Shows what one point says; null for none. */
  choose(point) {
    this.chosen = point === null ? null : Math.min(Math.max(point, 0), this.points - 1);
    this.bars.forEach((bar, index) => bar.classList.toggle("chosen", index === this.chosen));
    this.say();
  }

  say() {
    let sentence = "";
    if (this.chosen !== null && this.series) {
      const ago = (this.points - 1 - this.chosen) * this.series.seconds_per_point;
      const parts = SOURCES.filter((source) => this.series[source][this.chosen] >= 0.5).map(
        (source) => `${count(this.series[source][this.chosen])} ${source}`,
      );
      sentence = `${ago ? `${seconds(ago)} ago` : "now"}: ${parts.join(", ") || "no prompt tokens"}`;
    }
    if (this.read.textContent !== sentence) this.read.textContent = sentence;
  }

  show(series) {
    this.series = series;
    if (this.bars.length !== this.points) this.build();
    const sums = series.device.map((_, point) => SOURCES.reduce((sum, source) => sum + series[source][point], 0));
    const most = roundUp(Math.max(...sums));
    this.bars.forEach((bar, point) => {
      let top = 100;
      SOURCES.forEach((source, layer) => {
        const height = (100 * series[source][point]) / most;
        top -= height;
        bar.children[layer + 1].setAttribute("y", top.toFixed(2));
        bar.children[layer + 1].setAttribute("height", height.toFixed(2));
      });
    });
    this.most.textContent = compact(most);
    this.unit.textContent = `prompt tokens in each ${series.seconds_per_point} s`;
    this.say();
  }

  build() {
    const width = 300 / this.points;
    this.bars = Array.from({ length: this.points }, (_, point) => {
      const bar = document.createElementNS(NAMESPACE, "g");
      for (const source of ["hover", ...SOURCES]) {
        const part = document.createElementNS(NAMESPACE, "rect");
        part.setAttribute("class", source);
        part.setAttribute("x", (point * width + (source === "hover" ? 0 : width * 0.1)).toFixed(2));
        part.setAttribute("width", (width * (source === "hover" ? 1 : 0.8)).toFixed(2));
        part.setAttribute("y", "0");
        part.setAttribute("height", source === "hover" ? "100" : "0");
        bar.append(part);
      }
      return bar;
    });
    this.svg.replaceChildren(...this.bars);
  }
}
