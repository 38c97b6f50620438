//! Recorded traces in the form that Mooncake published: arrival in milliseconds, lengths, and the numbers of the
//! prompt's blocks of 512 tokens, of which equal ones are equal prefixes.

use super::{segment_id, RequestSpec, Segment};
use crate::error::SimulationError;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

fn block() -> usize {
    512
}

fn one() -> f64 {
    1.0
}

/// One line of a trace.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct TraceRecord {
    /// Milliseconds from the start.
    pub timestamp: f64,
    /// Tokens of the prompt.
    pub input_length: usize,
    /// Tokens of the answer.
    pub output_length: usize,
    /// The prompt's blocks.
    pub hash_ids: Vec<u64>,
}

/// A trace, from a file or in place.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// A file with a record in JSON per line.
    #[serde(default)]
    pub path: Option<PathBuf>,
    /// Records given in place, after those of the file.
    #[serde(default)]
    pub records: Vec<TraceRecord>,
    /// Tokens of a block.
    #[serde(default = "block")]
    pub block_tokens: usize,
    /// Arrivals are so many times as far apart.
    #[serde(default = "one")]
    pub time_scale: f64,
    /// At most so many requests, from the first; 0: all.
    #[serde(default)]
    pub most_requests: usize,
}

impl Trace {
    /// The requests, in the trace's order.
    pub fn requests(&self) -> Result<Vec<RequestSpec>, SimulationError> {
        let mut records = match &self.path {
            Some(path) => read(path)?,
            None => Vec::new(),
        };
        records.extend(self.records.iter().cloned());
        if self.most_requests > 0 {
            records.truncate(self.most_requests);
        }
        Ok(records.iter().enumerate().map(|(index, record)| self.request(index, record)).collect())
    }

    fn request(&self, index: usize, record: &TraceRecord) -> RequestSpec {
        let mut left = record.input_length.max(1);
        let mut prompt = Vec::with_capacity(record.hash_ids.len() + 1);
        for hash in &record.hash_ids {
            let tokens = left.min(self.block_tokens);
            if tokens == 0 {
                break;
            }
            left -= tokens;
            prompt.push(Segment { id: segment_id("block", *hash as usize, 0), tokens });
        }
        if left > 0 {
            prompt.push(Segment { id: segment_id("rest", index, 0), tokens: left });
        }
        RequestSpec {
            arrival_s: (record.timestamp * self.time_scale / 1e3).max(0.0),
            after: None,
            prompt,
            output: record.output_length.max(1),
            answer: segment_id("answer", index, 2),
        }
    }
}

fn read(path: &PathBuf) -> Result<Vec<TraceRecord>, SimulationError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| SimulationError::config(format!("trace {}: {error}", path.display())))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(number, line)| {
        serde_json::from_str(line).map_err(|error| {
            let place = format!("trace {} line {}", path.display(), number + 1);
            SimulationError::config(format!("{place}: {error}: one JSON record a line is expected"))
        })
    });
    parsed.collect()
}
