//! Host memory and the CPU Mover of the edge device <-> host. `Arena` is the host tier's memory, `Region` any span
//! that pages lie in, and `CopyEngine` the threads that carry pages between two regions, layer by layer for loads.
//! One rule gives every address: `KvLayout::offset`, which `cuda/address.h` states for kernels.

mod arena;
mod engine;
mod error;
mod give_back;
mod job;
mod kernel;
mod pages;
mod region;
mod throttle;
mod warm;
mod yardstick;

pub use arena::Arena;
pub use engine::{CopyConfig, CopyEngine, CopyStats, DirectionStats, MAX_NICENESS, MAX_THREADS};
pub use error::CopyError;
pub use give_back::give_back_pages;
pub use kernel::{Stores, STREAMING_FROM_BYTES};
pub use region::Region;
pub use throttle::{BandwidthLimit, HoldLayer, LayerWork, NoThrottle, Throttle};
pub use warm::warm;
pub use yardstick::{memcmp_baseline, memcpy_baseline, Yardstick, YardstickConfig};
