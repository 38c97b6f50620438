//! Conversations: each round's prompt is all that was said before and something new. A round begins once the one before
//! is answered and its reader has thought.

use super::{poisson, segment_id, After, RequestSpec, Segment};
use crate::random::{Law, Random};
use serde::{Deserialize, Serialize};

/// Conversations of several rounds.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Conversations {
    /// Conversations.
    pub sessions: usize,
    /// Rounds of all of them together, as even as can be.
    pub rounds: usize,
    /// Tokens that each session begins with, beside its first question.
    #[serde(default)]
    pub opening_tokens: Option<Law>,
    /// Tokens that a round adds to the prompt.
    pub question_tokens: Law,
    /// Tokens of an answer.
    pub output_tokens: Law,
    /// Seconds between an answer and the next question.
    pub think_s: Law,
    /// Rounds per second, each session's in order; or sessions per second if `rate_of_sessions`.
    #[serde(default)]
    pub rate: Option<f64>,
    /// Whether the rate is of sessions: later rounds come when their readers have thought.
    #[serde(default)]
    pub rate_of_sessions: bool,
}

impl Conversations {
    /// The requests, by arrival.
    pub fn requests(&self, seed: u64) -> Vec<RequestSpec> {
        let sessions = self.sessions.max(1);
        let openings = match &self.opening_tokens {
            Some(law) => law.counts(&mut Random::new(seed, 1), sessions),
            None => vec![0; sessions],
        };
        let questions = self.question_tokens.counts(&mut Random::new(seed, 2), self.rounds);
        let outputs = self.output_tokens.counts(&mut Random::new(seed, 3), self.rounds);
        let mut thinking = Random::new(seed, 6);
        let arriving = if self.rate_of_sessions { sessions } else { self.rounds };
        let arrivals = poisson(&mut Random::new(seed, 4), self.rate.unwrap_or(f64::INFINITY), arriving);
        let mut turns: Vec<usize> = (0..self.rounds).map(|round| round % sessions).collect();
        if !self.rate_of_sessions {
            Random::new(seed, 5).shuffle(&mut turns);
        }
        let mut said: Vec<Vec<Segment>> = openings.iter().enumerate().map(opening).collect();
        let mut latest: Vec<Option<usize>> = vec![None; sessions];
        let mut requests: Vec<RequestSpec> = Vec::with_capacity(self.rounds);
        for (round, session) in turns.into_iter().enumerate() {
            let after = latest[session].replace(round);
            let answer = segment_id("answer", round, 1);
            said[session].push(Segment { id: segment_id("round", round, 0), tokens: questions[round] });
            let think_s = self.think_s.draw(&mut thinking);
            let arrival_s = match (self.rate_of_sessions, after) {
                (false, _) => arrivals[round],
                (true, None) => arrivals[session],
                (true, Some(_)) => 0.0,
            };
            requests.push(RequestSpec {
                arrival_s,
                after: after.map(|request| After { request, think_s }),
                prompt: said[session].clone(),
                output: outputs[round],
                answer,
            });
            said[session].push(Segment { id: answer, tokens: outputs[round] });
        }
        requests
    }
}

fn opening((session, tokens): (usize, &usize)) -> Vec<Segment> {
    let segment = Segment { id: segment_id("opening", session, 0), tokens: *tokens };
    if *tokens == 0 {
        return Vec::new();
    }
    vec![segment]
}
