// Numbers as people read them, always with their unit.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });
const hundredths = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });
const two = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 2 });

/** Two digits after the point below ten, none from a hundred on. */
const plain = (value) => (value < 9.995 ? hundredths : value < 99.95 ? fine : whole).format(value);
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (value) => whole.format(value);
export const compact = (value) => (value < 10000 ? whole.format(value) : short.format(value));

/** A rate: whole numbers from ten on. */
export const rate = (value) => (value >= 9.95 ? compact(value) : two.format(value));

/** `23 µs`, `28 ms`, `0.61 s`, `12 s`, `3 min 20 s`, `1 h 05 min`. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.000995) return `${whole.format(Math.max(1, value * 1e6))} µs`;
  if (value < 0.0995) return `${(value < 0.00995 ? two : whole).format(value * 1000)} ms`;
  if (value < 59.5) return `${(value < 9.95 ? hundredths : whole).format(value)} s`;
  const rest = Math.round(value);
  if (rest < 3600) return `${Math.floor(rest / 60)} min ${rest % 60} s`;
  const minutes = Math.floor(rest / 60);
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 1440)} days`;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** `1.5 GiB`. */
export function bytes(value) {
  let unit = 0;
  for (; value >= 1000 && unit < UNITS.length - 1; unit++) value /= 1024;
  return `${plain(value)} ${UNITS[unit]}`;
}

/** `1.2 of 4 GiB`, in the unit of the larger. */
export function bytesOf(part, most) {
  const unit = UNITS.findIndex((_, power) => most / 1024 ** power < 1000 || power === UNITS.length - 1);
  return `${plain(part / 1024 ** unit)} of ${plain(most / 1024 ** unit)} ${UNITS[unit]}`;
}

/** `0.4%`, `98%`; never 100% unless it is all. */
export function percent(part, most) {
  if (!most) return "–";
  const value = (100 * part) / most;
  if (value > 99 && value < 100) return `${Math.floor(value * 10) / 10}%`;
  return `${value > 0 && value < 9.95 ? fine.format(Math.round(value * 10) / 10 || 0.1) : whole.format(value)}%`;
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");

/** Text of a prompt on one line: what cannot be seen is made visible. */
export function visible(text) {
  return text
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f]/g, (character) => String.fromCodePoint(0x2400 + character.codePointAt(0)));
}
