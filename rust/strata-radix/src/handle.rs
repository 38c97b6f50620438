//! Path ends. A handle names the first N pages of one sequence; it survives every split, and once its pages are
//! forgotten it is found out by its generation. A pin is a handle whose pages cannot go; it is given back once.

use crate::arena::NodeId;
use strata_types::TierId;

/// The end of a path: the first `pages()` pages of one token sequence. The empty path needs no node and is never
/// stale. Any other handle may become stale with the next call that changes the tree, unless its path is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle {
    pub(crate) node: NodeId,
    pub(crate) generation: u32,
    pub(crate) pages: u32,
}

impl Handle {
    /// The path of no pages.
    pub const EMPTY: Handle = Handle { node: NodeId::NIL, generation: 0, pages: 0 };

    /// The number of pages from the start of the sequence.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// The path of the first `pages` pages of this one; all of it if it is shorter.
    #[must_use]
    pub fn first(self, pages: u32) -> Handle {
        if pages == 0 {
            return Handle::EMPTY;
        }
        Handle { pages: pages.min(self.pages), ..self }
    }

    /// Whether the path has no pages.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }
}

impl Default for Handle {
    fn default() -> Self {
        Handle::EMPTY
    }
}

/// One counted pin on a path in one tier. It cannot be copied, so it can be given back only once.
#[must_use = "a pin that is dropped without `unpin` keeps its pages for ever"]
#[derive(Debug, PartialEq, Eq)]
pub struct Pin {
    pub(crate) handle: Handle,
    pub(crate) tier: TierId,
}

impl Pin {
    /// The path that is pinned.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// The number of pages pinned, from the start of the sequence.
    pub fn pages(&self) -> u32 {
        self.handle.pages
    }

    /// The tier in which the pages are pinned.
    pub fn tier(&self) -> TierId {
        self.tier
    }
}
