//! Movers that are no device: one that moves nothing, one that misbehaves on cue, one that writes down what it saw.

mod faulty;
mod noop;
mod recording;

pub use faulty::{Fault, FaultyMover};
pub use noop::NoopMover;
pub use recording::RecordingMover;
