// Figures as people read them. Bytes in powers of 1,024, as farshore status shows them.

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return unit === 0 ? `${Math.round(value)} B` : `${value.toFixed(1)} ${units[unit]}`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  return Math.round(value).toLocaleString("en");
}

export function perSecond(value, show = count) {
  if (value === null || value === undefined) return "–";
  if (show === count && value > 0 && value < 10) return `${value.toFixed(1)}/s`;
  return `${show(value)}/s`;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "not known";
  if (value < 1) return value === 0 ? "0 ms" : `${value.toFixed(2)} ms`;
  if (value < 1000) return `${value.toFixed(value < 10 ? 1 : 0)} ms`;
  return seconds(value / 1000);
}

// How long a leg takes; unlike a latency it may never have been seen.
export function leg(value) {
  return value === null || value === undefined ? "–" : milliseconds(value);
}

// Commands that are not there yet.
export function commands(object) {
  if (object.behind_commands === null) return "not known";
  return `${object.behind_commands_estimated ? "about " : ""}${count(object.behind_commands)}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 60) return `${Math.round(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} days`;
}

export function drain(value, behind) {
  // Of what is behind here nothing may wait, and much in the publisher's log.
  if (value === 0 || (value === undefined && behind === 0)) return "nothing waits";
  return value === null || value === undefined ? "not catching up" : `about ${seconds(value)}`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleString();
}
