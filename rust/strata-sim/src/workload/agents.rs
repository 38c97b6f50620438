//! Agents that call tools: what an agent knows grows with each step, and now and then it sends several requests about
//! the same context within a moment.

use super::{segment_id, RequestSpec, Segment};
use crate::random::{Law, Random};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Tool agents.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ToolAgents {
    /// Requests in all, about.
    pub requests: usize,
    /// Steps of an agent.
    pub steps: Law,
    /// Tokens of the prompt that all agents of a kind begin with.
    pub system_tokens: Law,
    /// Kinds of agents.
    pub kinds: usize,
    /// Tokens of an agent's task.
    pub task_tokens: Law,
    /// Tokens that a step adds.
    pub step_tokens: Law,
    /// Tokens of an answer.
    pub output_tokens: Law,
    /// Seconds between an agent's steps.
    pub pause_s: Law,
    /// The part of the steps that fan out.
    pub fan_out: f64,
    /// Requests of a step that fans out.
    pub fan_width: usize,
    /// Seconds within which those are sent.
    pub fan_spread_s: f64,
    /// Agents that begin in a second.
    pub agents_per_second: f64,
}

impl ToolAgents {
    /// The requests, by arrival.
    pub fn requests(&self, seed: u64) -> Vec<RequestSpec> {
        let kinds = self.kinds.max(1);
        let system = self.system_tokens.counts(&mut Random::new(seed, 1), kinds);
        let mut random = Random::new(seed, 2);
        let (mut requests, mut begins, mut agent) = (Vec::new(), 0.0, 0);
        while requests.len() < self.requests {
            begins += random.exponential(1.0 / self.agents_per_second);
            let kind = random.below(kinds);
            let mut known = vec![
                Segment { id: segment_id("system", kind, 0), tokens: system[kind] },
                Segment { id: segment_id("task", agent, 0), tokens: self.task_tokens.count(&mut random) },
            ];
            let mut now = begins;
            for step in 0..self.steps.count(&mut random) {
                let wide = random.unit() < self.fan_out;
                for _ in 0..if wide { self.fan_width.max(1) } else { 1 } {
                    let number = requests.len();
                    let mut prompt = known.clone();
                    let tokens = self.step_tokens.count(&mut random);
                    prompt.push(Segment { id: segment_id("call", number, 0), tokens });
                    requests.push(RequestSpec {
                        arrival_s: now + if wide { self.fan_spread_s * random.unit() } else { 0.0 },
                        after: None,
                        prompt,
                        output: self.output_tokens.count(&mut random),
                        answer: segment_id("answer", number, 3),
                    });
                }
                known.push(Segment {
                    id: segment_id("result", agent, step),
                    tokens: self.step_tokens.count(&mut random),
                });
                now += self.pause_s.draw(&mut random);
            }
            agent += 1;
        }
        requests.sort_by(|one, other| one.arrival_s.total_cmp(&other.arrival_s));
        requests
    }
}

/// The part of the requests that share their first `tokens` tokens or more with another that arrives within `span_s`.
pub fn shared_within(requests: &[RequestSpec], tokens: usize, span_s: f64) -> f64 {
    let mut seen: HashMap<Vec<u64>, Vec<(f64, usize)>> = HashMap::new();
    for (index, request) in requests.iter().enumerate() {
        let mut length = 0;
        let mut key = Vec::new();
        for segment in &request.prompt {
            length += segment.tokens;
            key.push(segment.id);
            if length >= tokens {
                break;
            }
        }
        if length >= tokens {
            seen.entry(key).or_default().push((request.arrival_s, index));
        }
    }
    let mut sharing = 0;
    for times in seen.values_mut() {
        times.sort_by(|one, other| one.0.total_cmp(&other.0));
        for (place, (at, _)) in times.iter().enumerate() {
            let near =
                |other: Option<&(f64, usize)>| other.is_some_and(|(time, _)| (time - at).abs() <= span_s);
            sharing += usize::from(near(times.get(place + 1)) || place > 0 && near(times.get(place - 1)));
        }
    }
    sharing as f64 / requests.len().max(1) as f64
}
