//! What happened when, as spans on tracks, and as a trace that Perfetto and Chrome read.

use serde::Serialize;
use serde_json::{json, Value};
use strata_types::Time;

/// Where a span is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Track {
    /// The device computes.
    Compute,
    /// The device could compute and does not.
    Stall,
    /// Host to device.
    LinkIn,
    /// Device to host.
    LinkOut,
    /// Disk to host.
    DiskRead,
    /// Host to disk.
    DiskWrite,
}

const TRACKS: [(Track, &str); 6] = [
    (Track::Compute, "device compute"),
    (Track::Stall, "device stalls"),
    (Track::LinkIn, "host to device"),
    (Track::LinkOut, "device to host"),
    (Track::DiskRead, "disk read"),
    (Track::DiskWrite, "disk write"),
];

/// One stretch of time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Span {
    /// Where it is drawn.
    pub track: Track,
    /// What happened.
    pub name: String,
    /// Nanoseconds from the start of the clock.
    pub from: u64,
    /// The end.
    pub to: u64,
}

/// All spans, if they are kept.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    keeps: bool,
    /// In the order in which they ended.
    pub spans: Vec<Span>,
}

impl Timeline {
    /// One that keeps spans, or none.
    pub fn new(keeps: bool) -> Timeline {
        Timeline { keeps, spans: Vec::new() }
    }

    /// Adds a span that has ended.
    pub fn add(&mut self, track: Track, from: Time, to: Time, name: impl FnOnce() -> String) {
        if self.keeps && to > from {
            self.spans.push(Span { track, name: name(), from: from.0, to: to.0 });
        }
    }

    /// The trace event format: one thread per track, times in microseconds.
    pub fn trace(&self) -> Value {
        let name = |(index, (_, name)): (usize, &(Track, &str))| json!({"ph": "M", "pid": 1, "tid": index, "name": "thread_name", "args": {"name": name}});
        let mut events: Vec<Value> = TRACKS.iter().enumerate().map(name).collect();
        events.extend(self.spans.iter().map(|span| {
            let track = TRACKS.iter().position(|(track, _)| *track == span.track);
            json!({"ph": "X", "pid": 1, "tid": track, "name": span.name, "ts": span.from as f64 / 1e3,
                   "dur": (span.to - span.from) as f64 / 1e3})
        }));
        json!({"traceEvents": events, "displayTimeUnit": "ms"})
    }
}
