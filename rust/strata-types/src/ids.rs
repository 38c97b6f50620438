//! Identifiers. Each is its own type, so that a page of one kind is never taken for another.

use std::fmt;

/// One token of a vocabulary.
pub type Token = u32;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// Layers that share page ids and hit rules.
    GroupId(u16)
);
id!(
    /// A slot that holds one page in one tier of one group.
    PageId(u32)
);
id!(
    /// A request, as its submitter numbered it.
    RequestId(u64)
);
id!(
    /// A batch that Core planned.
    PlanId(u64)
);
id!(
    /// A transfer between two tiers.
    TransferId(u64)
);
id!(
    /// One of the shards that a page is cut into under tensor parallelism.
    ShardId(u16)
);

/// A tier of the hierarchy, from the fastest (0) down. The number of tiers is data, not code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TierId(pub u8);

impl TierId {
    /// The memory that the model computes from.
    pub const DEVICE: TierId = TierId(0);
    /// Host DRAM.
    pub const HOST: TierId = TierId(1);
    /// Local SSD.
    pub const DISK: TierId = TierId(2);

    /// The index of this tier in per-tier tables.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The tier's name as flags, logs and metrics spell it.
    pub fn name(self) -> &'static str {
        match self.0 {
            0 => "device",
            1 => "host",
            2 => "disk",
            _ => "remote",
        }
    }
}

impl fmt::Display for TierId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
